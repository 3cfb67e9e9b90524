"""Merges of several rows in a program, interpreted."""

import pytest
import torch
from conftest import INTERPRETED

from hf_fastattn.kernels import reference
from hf_fastattn.kernels.spec import KV, Spec

if not INTERPRETED:
    pytest.skip("with TRITON_INTERPRET=1", allow_module_level=True)

from hf_fastattn.kernels.attention import split_kv
from hf_fastattn.kernels.host import gpu


@pytest.mark.parametrize("given, programs", [(None, (6, 2, 1)), (2, (21, 2, 1))])
def test_rows_of_fixed_splits_share_a_program_unless_the_number_of_splits_is_given(given, programs, monkeypatch):
    """With a number of splits, the bits of a row must not depend on the batch, which determines the rows of a program."""
    monkeypatch.setattr(gpu, "num_sms", lambda device: 2)
    q = torch.randn(1, 6, 7, 32)
    kv = KV(*(torch.randn(1, 2, 300, 32) for _ in range(2)))
    plan = split_kv._prepare.__wrapped__((q, *kv.tensors, None, None, None), kv.form, Spec(), True, given)
    assert plan.launches.then.grid == programs
    out, lse = plan.run(q, kv, Spec(), None, None, q, True)
    want, want_lse = reference.attention(q, kv, Spec(), return_lse=True)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
