"""`python -m hf_fastattn` is `hf-fastattn`."""

from hf_fastattn_cli import main

raise SystemExit(main())
