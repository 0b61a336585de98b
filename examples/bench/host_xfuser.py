"""The model of `bench hosts` with xDiT, whose package is xfuser: FLUX.1 on one rank.

xDiT has its own class of the transformer, with its own attention processors and its choice of attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from . import diffusion
from .harness import DEVICE
from .host_models import Host, Pair, Side, need_gpu, one_rank
from .turns import Turns


@contextmanager
def groups() -> Iterator[None]:
    """xDiT's groups, all of this process alone."""
    from xfuser.core.distributed import parallel_state

    backend = "nccl" if DEVICE == "cuda" else "gloo"
    with one_rank():
        parallel_state.init_distributed_environment(1, 0, local_rank=0, backend=backend)
        try:
            parallel_state.initialize_model_parallel(backend=backend)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state._FS = None  # which xDiT does not destroy
            parallel_state.destroy_distributed_environment()


@contextmanager
def pair(smoke: bool) -> Iterator[Pair]:
    """FLUX.1 as `bench diffusion` builds it, in xDiT's class."""
    from xfuser import envs
    from xfuser.config import xFuserArgs
    from xfuser.core.distributed import get_runtime_state, initialize_runtime_state
    from xfuser.model_executor.models.transformers import transformer_flux as xdit

    from jitrope.integrations import xfuser as integration

    if envs.get_device_name() != DEVICE:
        need_gpu()
    flux, cls = diffusion.MODELS["flux"], xdit.xFuserFlux1Transformer2DWrapper
    transformer, words, _ = diffusion.build(flux, (1, 1) if smoke else flux.blocks, smoke)
    words["return_dict"] = False
    known = inspect.signature(cls.__init__).parameters
    config = {name: value for name, value in transformer.config.items() if name in known}
    with groups():
        with torch.device("meta"):
            stock, ours = (cls(**config).eval().requires_grad_(False) for _ in range(2))
        for model in (stock, ours):
            model.load_state_dict(transformer.state_dict(), assign=True)
        initialize_runtime_state(SimpleNamespace(transformer=ours), xFuserArgs().create_config()[0])
        get_runtime_state().max_condition_sequence_length = words["encoder_hidden_states"].shape[1]
        with Turns() as turns:
            turns.take(stock)
            report = turns.take(ours, integration.enable)
            yield Pair(Side(stock, words), Side(ours, words), lambda: report.calls, trained=False)


HOSTS = {"xfuser-flux": Host("xfuser.__version__", "FLUX.1", "denoise, 4608 tokens, 12 blocks", pair)}
