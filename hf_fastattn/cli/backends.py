"""hf-fastattn backends."""

import torch

from .. import registry
from ..report.tables import table
from .options import Traceback


def backends(traceback: Traceback = False) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for name in registry.names():
        backend = registry.get(name)
        kernels = [getattr(kernel, "name", "plain torch") for kernel in (backend.prefill, backend.decode or backend.prefill)]
        try:
            runs = getattr(backend.prefill, "where", lambda device: "plain torch")(device)
        except RuntimeError as error:
            runs = f"no: {error}"
        rows.append([name, backend.summary, *kernels, runs.removeprefix("the ")])
    print(table(["backend", "summary", "prefill", "decode", f"runs here, on {device}"], rows))
    print('\nUse one as attn_implementation="lean" in from_pretrained(), or as hf_fastattn.patch(model, "lean").')
