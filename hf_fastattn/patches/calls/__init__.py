"""What a call of generate() does under patch()."""
