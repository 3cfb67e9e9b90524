"""`python -m hf_fastattn` is `hf-fastattn`."""

from .cli import main

raise SystemExit(main())
