"""Makes `attn_implementation="lean"` known to Transformers, and `--model hf-fastattn` to lm-eval.

This is for processes that do not import hf_fastattn.

torch calls `autoload()` at the end of `import torch`, as an entry point of the group "torch.backends". The module is outside the
package, whose import brings Transformers and Triton. HF_FASTATTN_AUTOLOAD=0 turns it off.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

NAMES = ("batch_invariant", "fa2", "lean", "reference", "split_kv")  # the exact backends
# Files of models that take the class of their attention from a dict with Transformers' own names, and those dicts.
CLASSES = {
    "bark.modeling_bark": "BARK_ATTENTION_CLASSES",
    "data2vec.modeling_data2vec_vision": "DATA2VEC_VISION_SELF_ATTENTION_CLASSES",
    "deepseek_ocr2.modeling_deepseek_ocr2": "DEEPSEEK_OCR2_SAM_VISION_ATTENTION_CLASSES",
    "falcon.modeling_falcon": "FALCON_ATTENTION_CLASSES",
    "git.modeling_git": "GIT_SELF_ATTENTION_CLASSES",
    "gpt_neo.modeling_gpt_neo": "GPT_NEO_ATTENTION_CLASSES",
    "gptj.modeling_gptj": "GPTJ_ATTENTION_CLASSES",
    "sam.modeling_sam": "SAM_VISION_ATTENTION_CLASSES",
    "sam_hq.modeling_sam_hq": "SAM_HQ_VISION_ATTENTION_CLASSES",
    "superglue.modeling_superglue": "SUPERGLUE_SELF_ATTENTION_CLASSES",
    "unlimited_ocr.modeling_unlimited_ocr": "UNLIMITED_OCR_SAM_VISION_ATTENTION_CLASSES",
}
LM, LM_CLASS = "hf-fastattn", "hf_fastattn.evaluation.hflm:FastHFLM"  # the model type of lm-eval


def autoload() -> None:
    """Register NAMES and LM, once Transformers and lm-eval are imported. Never raises: that would break `import torch`."""
    if os.environ.get("HF_FASTATTN_AUTOLOAD") == "0":
        return
    for awaited, register in (("lm_eval.models", register_lm), ("transformers.modeling_utils", _register)):
        if _is_imported(awaited):
            register()
        else:
            sys.meta_path.insert(0, _Finder(awaited, register))


def _is_imported(name: str) -> bool:
    """Whether a module is imported completely; while Transformers imports torch it is not."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


class _Finder:
    """Finds one module as the other finders do, and once that has been imported calls `register` and removes itself."""

    def __init__(self, awaited: str, register: Callable[[], None]):
        self.awaited, self.register = awaited, register

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.awaited:
            if not _is_imported(self.awaited):
                return None
            self.leave()  # the import of the awaited module began before this finder was installed
            self.register()
        # Also for another module: Python's loop over the finders passes over the one behind a finder that has left.
        try:
            found = (finder.find_spec(name, path, target) for finder in list(sys.meta_path) if finder is not self)
            spec = next(spec for spec in found if spec is not None)
            if spec.loader is not None and name == self.awaited:
                self._follow(spec.loader)
            return spec
        except Exception:  # the next finders report the error
            return None

    def _follow(self, loader: Loader) -> None:
        """Call `register` once this loader has executed its module."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # the loader is restored
            execute(module)
            self.leave()
            self.register()

        vars(loader)["exec_module"] = exec_module

    def leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def _register() -> None:
    """Stubs under the names that are not registered yet, the mask first: attention without a mask would see all keys."""
    try:
        attention, mask = _registries()
        for name in NAMES:
            if name not in attention and name not in mask:
                mask.register(name, partial(_mask, name))
                attention.register(name, partial(_attention, name))
                refuse(name)
    except Exception:  # an incompatible Transformers, whose own error says that the name is unknown
        pass


_refused: set[str] = set()  # the names in the dicts of CLASSES


def refuse(name: str) -> None:
    """Let models that take the class of their attention from a dict refuse the name of a backend in a sentence."""
    first = not _refused
    _refused.add(name)
    for file in CLASSES:
        awaited = f"transformers.models.{file}"
        if _is_imported(awaited):
            _refuse_in(file)
        elif first:
            sys.meta_path.insert(0, _Finder(awaited, partial(_refuse_in, file)))


def _refuse_in(file: str) -> None:
    classes = getattr(sys.modules.get(f"transformers.models.{file}"), CLASSES[file], None)
    if isinstance(classes, dict):
        for name in _refused:
            classes.setdefault(name, partial(_refusal, name, file.partition(".")[0]))


def _refusal(name: str, model: str, *args: Any, **kwargs: Any) -> None:
    raise ValueError(
        f"attn_implementation={name!r} cannot be used here: {model} computes attention in its own code, where no registered "
        "backend can run. Load this model without attn_implementation."
    )


def register_lm() -> None:
    """A placeholder under LM, unless the name is taken. lm-eval imports its class when the name is asked for.

    To be called when lm_eval.models has been imported: lm-eval imports it, its own model types, only while it knows none.
    """
    try:
        from lm_eval.api.registry import model_registry

        if LM not in model_registry:
            model_registry.register(LM, target=LM_CLASS)
    except Exception:  # an incompatible lm-eval, whose own error says that the name is unknown
        pass


def _registries() -> tuple[AttentionInterface, AttentionMaskInterface]:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS


def _functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The attention and the mask function. Importing the package registers all its names; functions of others are put back."""
    before = [(registry, dict(type(registry)())) for registry in _registries()]
    from hf_fastattn import names
    from hf_fastattn.attention.function import attention_forward
    from hf_fastattn.attention.mask_function import attention_mask

    for registry, functions in before:
        for name in functions.keys() & set(names()):
            if getattr(functions[name], "func", None) not in (_attention, _mask):
                registry.register(name, functions[name])
    return attention_forward, attention_mask


def _attention(name: str, *args: Any, **kwargs: Any) -> Any:
    return _functions()[0](name, *args, **kwargs)


def _mask(name: str, *args: Any, **kwargs: Any) -> Any:
    attention, _ = _registries()
    if getattr(attention.get(name), "func", None) is not _attention:
        return None  # another package's attention under this name, without a mask function: as if this one were not registered
    return _functions()[1](name, *args, **kwargs)
