"""`integrations.diffusers`: forms of rope, tables, `enable` and `disable`. test_diffusion_models.py runs the models."""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import inspect
import io
import itertools
import os
import pickle
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import FunctionType, SimpleNamespace

import pytest
import torch

import jitrope
from jitrope.integrations import _host
from jitrope.integrations import diffusers as integration
from jitrope.integrations.diffusers import forms, norms, sites, ulysses
from tests.said import said

diffusers = pytest.importorskip("diffusers", reason="the diffusers extra is not installed")
from .devices import DEVICES  # noqa: E402
from .diffusion_zoo import FUSED_CALLS, MODELS, forward, prepared  # noqa: E402


@pytest.fixture
def flux():
    return prepared(MODELS["FluxTransformer2DModel"])


@pytest.fixture
def wan():
    return prepared(MODELS["WanTransformer3DModel"])


# ---- calls left to the host --------------------------------------------------------------------------


def shared_call(x, cos, sin, **words):
    """(the host's result, jitrope's result, the reasons why jitrope left the call to the host)."""
    from diffusers.models.embeddings import apply_rotary_emb

    before = _host.reasons["diffusers"].copy()
    ours = forms.rope_of(forms.SHARED, apply_rotary_emb)(x, (cos, sin), **words)
    return apply_rotary_emb(x, (cos, sin), **words), ours, list(_host.reasons["diffusers"] - before)


def full_tables(seqlen=6, head_dim=16):
    angles = torch.rand(seqlen, head_dim // 2).repeat_interleave(2, -1)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x, cos, sin: (x, cos.double(), sin.double()), "cos is torch.float64"),
        (lambda x, cos, sin: (x.double(), cos, sin), "q is torch.float64"),
        (lambda x, cos, sin: (x, cos[:1], sin[:1]), "the tables' shape"),
        (lambda x, cos, sin: (x.repeat(1, 1, 1, 33), cos.repeat(1, 33), sin.repeat(1, 33)), "at most 512 is possible"),
    ],
)
def test_what_is_not_ours_is_the_hosts(change, reason) -> None:
    x, cos, sin = change(torch.randn(2, 6, 3, 16), *full_tables())
    want, ours, reasons = shared_call(x, cos, sin, sequence_dim=1)
    assert torch.equal(ours, want)
    assert len(reasons) == 1
    assert reason in reasons[0]


@pytest.mark.parametrize("sequence_dim", [1, 2])
@pytest.mark.parametrize("unbind_dim", [-1, -2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_function(dtype, unbind_dim, sequence_dim) -> None:
    x = torch.randn((2, 6, 3, 16) if sequence_dim == 1 else (2, 3, 6, 16)).to(dtype)
    want, ours, reasons = shared_call(x, *full_tables(), use_real_unbind_dim=unbind_dim, sequence_dim=sequence_dim)
    assert torch.equal(ours, want)
    assert not reasons


def test_arguments_of_another_version_go_to_the_host() -> None:
    seen = []
    rope = forms.rope_of(forms.SHARED, lambda *arguments, **words: seen.append(words))
    rope(torch.randn(2, 6, 3, 16), full_tables(), scale=2)
    assert seen == [{"scale": 2}]


@pytest.mark.gpu
def test_tables_that_stay_on_the_cpu() -> None:
    """Offload leaves tables on the CPU; jitrope moves them in every call."""
    x = torch.randn(2, 6, 3, 16, device="cuda")
    cos, sin = full_tables()
    want, ours, reasons = shared_call(x, cos, sin, sequence_dim=1)
    assert torch.equal(ours, want)
    assert not reasons


# ---- tables -----------------------------------------------------------------------------------------


def nested(cls, name):
    """A function that the host defines inside a processor's `__call__`."""
    code = next(c for c in cls.__call__.__code__.co_consts if getattr(c, "co_name", "") == name)
    return FunctionType(code, cls.__call__.__globals__)


def converted(name):
    """A rope with converted tables: (our function, the host's, the arguments before the table, the table)."""
    file, x = importlib.import_module(f"diffusers.models.transformers.transformer_{name}"), torch.randn(1, 6, 3, 12)
    angles = torch.rand(1, 6, 1, 6)
    turns = torch.stack((angles.cos(), -angles.sin(), angles.sin(), angles.cos()), -1).unflatten(-1, (2, 2))
    if name == "hidream_image":
        form, host, arguments, table = forms.HIDREAM, file.apply_rope, (x, x + 1), turns
    elif name == "prx":
        form, host, arguments = forms.PRX, file.apply_rope, (x.transpose(1, 2),)
        table = turns.transpose(1, 2).contiguous()
    elif name == "kandinsky":
        form, host, arguments, table = (
            forms.KANDINSKY5,
            nested(file.Kandinsky5AttnProcessor, "apply_rotary"),
            (x,),
            turns,
        )
    elif name == "kandinsky6":
        form, host, arguments, table = forms.KANDINSKY6, file.apply_rotary, (x[0],), turns[0]
    elif name == "ernie_image":
        host = nested(file.ErnieImageSingleStreamAttnProcessor, "apply_rotary_emb")
        form, arguments, table = forms.ERNIE, (x,), angles.repeat_interleave(2, -1)
    elif name == "stable_audio3":
        form, host, arguments = forms.STABLE_AUDIO3, file._apply_rotary_partial, (x.transpose(1, 2),)
        table = torch.rand(6, 8)
    else:
        form, host, arguments = forms.WAN_ANIMATE2, file.rope_apply, (x, torch.tensor([[1, 2, 3]]))
        table = torch.polar(torch.ones(8, 6).double(), torch.rand(8, 6).double())
    return forms.rope_of(form, host), host, arguments, table


def written_in_inference_mode(table, other):
    with torch.inference_mode():
        table.copy_(other)


WRITES = {
    "in place": lambda table, other: table.mul_(0.5),
    "copied": lambda table, other: table.copy_(other),
    "in inference mode": written_in_inference_mode,
    "through data": lambda table, other: table.data.copy_(other),
    "new data": lambda table, other: setattr(table, "data", other),
    "by numpy": lambda table, other: table.numpy().__imul__(0.5),
}


@pytest.mark.parametrize("made_in_inference_mode", [False, True])
@pytest.mark.parametrize(
    "name", ["hidream_image", "prx", "kandinsky", "kandinsky6", "ernie_image", "stable_audio3", "wan_animate_2"]
)
def test_a_table_that_was_written_to_is_read_again(name, made_in_inference_mode) -> None:
    """Every way to write counts: inference tensors have no version, and a write through `.data` does not change it."""
    before = _host.calls["diffusers"]["host"]
    for write in WRITES.values():
        with torch.inference_mode(made_in_inference_mode):
            ours, host, arguments, table = converted(name)
            first = ours(*arguments, table)
            write(table, converted(name)[3])
            want, got = host(*arguments, table), ours(*arguments, table)
        pairs = zip(got, want) if isinstance(want, tuple) else [(got, want)]
        assert all(torch.equal(a, b) for a, b in pairs)
        assert not torch.equal(first[0], got[0])
    assert _host.calls["diffusers"]["host"] == before


def test_a_grid_that_was_written_to_is_read_again() -> None:
    ours, host, (x, grid), table = converted("wan_animate_2")
    with torch.inference_mode():
        grid = grid.clone()
        first = ours(x, grid, table)
        grid.copy_(torch.tensor([[3, 2, 1]]))
        assert torch.equal(ours(x, grid, table), host(x, grid, table))
    assert not torch.equal(first, ours(x, grid, table))


def test_tables_of_inference_mode_serve_in_training() -> None:
    with torch.inference_mode():
        ours, _, (q, k), table = converted("hidream_image")
        ours(q.clone(), k.clone(), table)
    x = torch.randn(1, 6, 3, 12, requires_grad=True)
    sum(out.sum() for out in ours(x, x, table)).backward()
    assert x.grad is not None


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_conjugated_tables(dtype) -> None:
    x, table = torch.randn(2, 4, 3, 16), torch.polar(torch.ones(1, 4, 8), torch.rand(1, 4, 8)).to(dtype)

    def host(x, freqs_cis):  # the code of hosts with complex tables
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * freqs_cis.unsqueeze(2)).flatten(3).type_as(x)

    before = _host.calls["diffusers"]["host"]
    turned = forms.rope_of(forms.COMPLEX_ROWS, host)(x, table.conj())
    assert torch.equal(turned, host(x, table.conj()))
    assert not torch.equal(turned, host(x, table))
    assert _host.calls["diffusers"]["host"] == before


def test_tables_are_read_where_they_are(monkeypatch) -> None:
    """The kernel gets views of the host's real, complex and packed tables."""
    seen = []

    def rotated(x, *arguments, **words):
        seen.extend(t for t in words.values() if isinstance(t, torch.Tensor))
        return jitrope.apply_rope(x, *arguments, **said(**words))

    monkeypatch.setattr(forms, "apply_rope", rotated)
    x, (cos, sin) = torch.randn(2, 6, 3, 16), full_tables()
    both, table = torch.cat((cos, sin), -1)[None], torch.complex(cos[:, ::2], sin[:, ::2])
    calls = (
        (forms.WAN, (x, cos[None, :, None], sin[None, :, None])),
        (forms.HELIOS, (x, both)),
        (forms.QWEN, (x, table, False)),
        (forms.ANY_FLOW, (x.transpose(1, 2), table.to(torch.complex128)[None, None])),
    )
    for form, (rotates, *host_tables) in calls:
        seen.clear()
        forms.rope_of(form, None)(rotates, *host_tables)
        theirs = {t.untyped_storage().data_ptr() for t in host_tables if isinstance(t, torch.Tensor)}
        assert {t.untyped_storage().data_ptr() for t in seen} == theirs


# ---- replacing --------------------------------------------------------------------------------------


def test_enable_twice_and_state(flux) -> None:
    model, _ = flux
    stock = {name: type(p) for name, p in model.attn_processors.items()}
    objects = {name: id(p) for name, p in model.attn_processors.items()}
    integration.enable(model)
    report = integration.enable(model)
    assert set(report.replaced) == {"FluxAttnProcessor"}
    assert report.replaced.total() == len(stock)
    assert "FluxAttnProcessor" in report.table()
    processor = next(iter(model.attn_processors.values()))
    assert isinstance(processor, next(iter(stock.values())))
    processor._attention_backend = "native"  # as set_attention_backend sets it
    integration.disable(model)
    assert {name: type(p) for name, p in model.attn_processors.items()} == stock
    assert {name: id(p) for name, p in model.attn_processors.items()} == objects
    assert next(iter(model.attn_processors.values()))._attention_backend == "native"
    integration.disable(model)


def test_class_attributes_stay(flux) -> None:
    """`_attention_backend` is still there. diffusers silently skips a processor without it."""
    model, _ = flux
    with integration.enable(model):
        for processor in model.attn_processors.values():
            assert processor._attention_backend is None
            assert processor._parallel_config is None
        model.set_attention_backend("native")
        assert all(p._attention_backend == "native" for p in model.attn_processors.values())


def test_the_signature_stays(flux) -> None:
    """diffusers passes a processor only the arguments that its signature names."""
    model, _ = flux
    processor = next(iter(model.attn_processors.values()))
    before = inspect.signature(processor.__call__)
    with integration.enable(model):
        assert inspect.signature(processor.__call__) == before


def test_nothing_of_other_models_changes(flux) -> None:
    model, inputs = flux
    other = copy.deepcopy(model)
    with integration.enable(model), torch.no_grad():
        before = _host.calls["diffusers"].copy()
        forward(other, inputs)
        assert _host.calls["diffusers"] == before
    assert not any(hasattr(type(p), "_jitrope_host") for p in other.attn_processors.values())


def test_a_processor_with_weights_keeps_them(flux) -> None:
    """The IP adapter of FLUX is a processor and a module; its parameters stay the model's."""
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    model, _ = flux
    attention = model.transformer_blocks[0].attn
    adapter = FluxIPAdapterAttnProcessor(hidden_size=attention.inner_dim, cross_attention_dim=16)
    attention.set_processor(adapter)
    before = dict(model.named_parameters())
    with integration.enable(model) as report:
        assert report.replaced["FluxIPAdapterAttnProcessor"] == 1
        assert report.replaced["FluxAttnProcessor"] == len(model.attn_processors) - 1
        assert isinstance(attention.processor, FluxIPAdapterAttnProcessor)
        inside = dict(model.named_parameters())
        assert inside.keys() == before.keys()
        assert all(inside[key] is before[key] for key in before)
    assert attention.processor is adapter
    assert type(adapter) is FluxIPAdapterAttnProcessor


def test_layer_skip_knows_the_twins() -> None:
    """The hooks of layer skipping look the processor's class up in a table."""
    from diffusers.hooks import LayerSkipConfig, apply_layer_skip

    model, inputs = prepared(MODELS["CogView4Transformer2DModel"])
    config = {"indices": [0], "fqn": "transformer_blocks", "skip_attention_scores": True, "skip_ff": False}
    config = LayerSkipConfig(skip_attention=False, **config)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        apply_layer_skip(model, config)
        stock = forward(model, inputs)
        with integration.enable(twin, fuse_norm=False):
            apply_layer_skip(twin, config)
            assert torch.equal(forward(twin, inputs), stock)


def test_unknown_models_are_refused() -> None:
    model = diffusers.UNet2DModel(
        block_out_channels=(32, 64),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    with pytest.raises(
        jitrope.JitropeError, match=r"UNet2DModel has .*AttnProcessor2_0, which are not among .*of diffusers"
    ):
        integration.enable(model)
    with pytest.raises(jitrope.JitropeError, match="no attention processors"):
        integration.enable(torch.nn.Linear(2, 2))


def test_an_unknown_version_is_refused(flux, monkeypatch) -> None:
    from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

    def call(self, attn, hidden_states):
        return hidden_states

    call.__module__ = FluxAttnProcessor.__module__
    monkeypatch.setattr(FluxAttnProcessor, "__call__", call)
    expected = rf"diffusers {diffusers.__version__}: FluxAttnProcessor does not call apply_rotary_emb"
    with pytest.raises(jitrope.JitropeError, match=expected.replace(".", r"\.")):
        integration.enable(flux[0])


def test_pipeline(flux) -> None:
    model, _ = flux
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4)  # has its own processors
    nothing = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipeline = diffusers.FluxPipeline(scheduler=scheduler, vae=vae, transformer=model, **nothing)
    with integration.enable(pipeline) as report:
        assert set(report.replaced) == {"FluxAttnProcessor"}
        assert not report.left
    assert not any(hasattr(type(p), "_jitrope_host") for p in model.attn_processors.values())


# ---- contexts, reports and other threads -----------------------------------------------------------------

# One of each way: fused processors, a replaced name, processors with an inline rotation, a module's forward.
WAYS = [
    "FluxTransformer2DModel",
    "WanTransformer3DModel",
    "HiDreamImageTransformer2DModel",
    "Ideogram4Transformer2DModel",
    "SanaWMTransformer3DModel",
]


def classes_in(model):
    return [type(part) for part in integration._parts(model)]


def test_contexts_undo_only_themselves(flux) -> None:
    model, _ = flux
    stock = classes_in(model)
    with integration.enable(model):
        fused = classes_in(model)
        assert fused != stock
        with integration.enable(model):
            pass
        assert classes_in(model) == fused
        with integration.enable(model, fuse_norm=False):
            assert classes_in(model) not in (fused, stock)
        assert classes_in(model) == fused
    assert classes_in(model) == stock
    integration.enable(model)
    with integration.enable(model, fuse_norm=False), integration.enable(model):
        assert classes_in(model) == fused
    assert classes_in(model) == fused
    with integration.enable(model, fuse_norm=False):
        integration.disable(model)  # everything, permanently
        assert classes_in(model) == stock
    assert classes_in(model) == stock


def test_a_report_keeps_no_model_and_shows_none(flux) -> None:
    model = prepared(MODELS["FluxTransformer2DModel"])[0]
    report = integration.enable(model)
    layers = sum(report.replaced.values())
    assert repr(report) == f"<jitrope in diffusers: norm and rope fused in {layers} attention layers>"
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    with report:
        pass


def test_a_report_names_custom_processors_and_says_when_it_is_disabled() -> None:
    class Custom:
        def __call__(self, *_: object) -> None: ...

    model = prepared(MODELS["FluxTransformer2DModel"])[0]
    layers = len(model.attn_processors)
    model.transformer_blocks[0].attn.processor = Custom()
    report = integration.enable(model)
    assert report.left == {"Custom": 1}
    assert report.notes == {"Custom": "not a processor of diffusers; call jitrope.apply_rope in it"}
    said = f"norm and rope fused in {layers - 1} of {layers} attention layers, 1 left alone"
    assert str(report).startswith(f"{said}; 0 calls since")
    integration.disable(model)
    assert str(report).startswith(f"{said} (disabled); 0 calls since")
    integration.enable(model)
    assert str(report).startswith(f"{said}; 0 calls since")


@pytest.mark.parametrize("fuse_norm", [True, False])
def test_an_enable_that_fails_replaces_nothing(fuse_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another version of diffusers the last class of the last model does not call the rope function."""
    from diffusers.models.transformers import transformer_flux2

    def other(self: object, attn: object, hidden_states: object, image_rotary_emb: object = None) -> object:
        return hidden_states

    other.__module__ = transformer_flux2.__name__
    monkeypatch.setattr(transformer_flux2.Flux2ParallelSelfAttnProcessor, "__call__", other)
    models = [MODELS[name].make()[0] for name in ("FluxTransformer2DModel", "Flux2Transformer2DModel")]
    before = [type(p) for model in models for p in model.attn_processors.values()]
    with pytest.raises(jitrope.JitropeError, match="Flux2ParallelSelfAttnProcessor does not call apply_rotary_emb"):
        integration.enable(SimpleNamespace(components=dict(enumerate(models))), fuse_norm=fuse_norm)
    assert [type(p) for model in models for p in model.attn_processors.values()] == before


@pytest.mark.parametrize("function", ["enable", "disable"])
@pytest.mark.parametrize("given", ["model", 3, None, diffusers.FluxPipeline])
def test_what_is_not_a_model_is_refused(function: str, given: object) -> None:
    with pytest.raises(jitrope.InvalidInput, match=f"{function}: model_or_pipeline is .*; it must be a model, or a pi"):
        getattr(integration, function)(given)


def test_fuse_norm_is_a_flag(flux) -> None:
    with pytest.raises(jitrope.InvalidInput, match="enable: fuse_norm is 'x'; it must be True or False"):
        integration.enable(flux[0], fuse_norm="x")


def test_a_model_of_transformers_belongs_to_its_module() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaModel(transformers.LlamaConfig(num_hidden_layers=1, hidden_size=32, vocab_size=8))
    with pytest.raises(jitrope.JitropeError, match=r"; it is of transformers: use jitrope.integrations.transformers$"):
        integration.enable(model)


def test_calls_that_were_not_made_count_as_0() -> None:
    assert integration.Report().calls["fused"] == 0


@pytest.mark.parametrize("name", WAYS)
def test_enable_and_disable_in_the_midst_of_a_forward(name) -> None:
    """They run before every module's call, like another thread. Nothing raises; the result is the stock model's."""
    model, inputs = prepared(MODELS[name])
    on, off = functools.partial(integration.enable, model), functools.partial(integration.disable, model)
    steps = itertools.cycle([on, off, functools.partial(on, fuse_norm=False), on, off])
    with torch.no_grad():
        torch.manual_seed(1)
        stock = forward(model, inputs)
        handle = torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: next(steps)() and None)
        try:
            for _ in range(4):  # each begins with another step
                torch.manual_seed(1)
                assert torch.equal(forward(model, inputs), stock)
                next(steps)()
        finally:
            handle.remove()


def test_enable_and_disable_in_another_thread(flux) -> None:
    model, inputs = flux
    with torch.no_grad():
        stock = forward(model, inputs)
    ended = threading.Event()

    def flip():
        while not ended.is_set():
            integration.enable(model)
            integration.disable(model)

    thread = threading.Thread(target=flip)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        with torch.no_grad():
            assert all(torch.equal(forward(model, inputs), stock) for _ in range(20))
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval)


# ---- pickles and copies ----------------------------------------------------------------------------------


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("fuse_norm", [False, True])
@pytest.mark.parametrize("name", WAYS)
def test_copies_are_enabled_as_the_model_is(name, fuse_norm) -> None:
    model, inputs = prepared(MODELS[name])
    stock = classes_in(model)

    def run(other):
        torch.manual_seed(1)
        return forward(other, inputs)

    with torch.no_grad():
        want = run(model)
        integration.enable(model, fuse_norm=fuse_norm)
        twins = classes_in(model)
        for copied in (pickled, saved, copy.deepcopy):
            other = copied(model)
            assert classes_in(other) == twins
            assert torch.equal(run(other), want)
            integration.disable(other)
            assert classes_in(other) == stock
            assert classes_in(model) == twins
            assert torch.equal(run(other), want)


def run(*command, cwd=None, **environment):
    """Run Python so that it can import jitrope and these tests."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), **environment}
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=cwd, env=env)
    assert done.returncode == 0, done.stderr[-4000:]


LOADED = """
import pickle, sys
import torch

for path in sys.argv[1:]:
    model, inputs, want = torch.load(path, weights_only=False)
    with open(path + ".pickle", "rb") as file:
        again = pickle.load(file)
    from jitrope.integrations._host import calls  # imported by now

    for loaded in (model, again):
        before = sum(calls["diffusers"].values())
        with torch.no_grad():
            torch.manual_seed(1)
            output = loaded(**inputs, return_dict=False)[0]
        output, expected = (x[0] if isinstance(x, (list, tuple)) else x for x in (output, want))
        assert torch.equal(output, expected), path
        assert sum(calls["diffusers"].values()) > before and not calls["diffusers"]["host"], path
"""


@pytest.mark.slow
def test_a_fresh_process_loads_them(tmp_path) -> None:
    """The process imports torch and pickle. Loading imports jitrope, and the model is enabled as it was here."""
    paths = []
    for name in WAYS[:2] + WAYS[3:]:
        for fuse_norm in (False, True):
            model, inputs = prepared(MODELS[name])
            with torch.no_grad():
                torch.manual_seed(1)
                want = model(**inputs, return_dict=False)[0]
            integration.enable(model, fuse_norm=fuse_norm)
            paths.append(str(tmp_path / f"{name}-{fuse_norm}"))
            torch.save((model, inputs, want), paths[-1])
            Path(paths[-1] + ".pickle").write_bytes(pickle.dumps(model))
    # The bits of matrix products depend on the number of threads.
    run("-c", LOADED, *paths, cwd=tmp_path, OMP_NUM_THREADS=str(torch.get_num_threads()))


def test_a_pickle_loads_where_the_host_is_another_version(flux, monkeypatch) -> None:
    """If the class is not supported there, the processor stays the host's, which is correct too."""
    from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

    model, _ = flux
    integration.enable(model)
    data = pickle.dumps(model)

    def call(self, attn, hidden_states):
        return hidden_states

    call.__module__ = FluxAttnProcessor.__module__
    monkeypatch.setattr(FluxAttnProcessor, "__call__", call)
    assert set(classes_in(pickle.loads(data))) == {FluxAttnProcessor}


# ---- other changes of a model ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["CogVideoXTransformer3DModel", "HunyuanDiT2DModel", "FluxTransformer2DModel"])
def test_projections_are_fused_and_unfused_while_enabled(name) -> None:
    """Some models store their processors meanwhile; `disable` restores those too."""
    model, inputs = prepared(MODELS[name])
    stock = classes_in(model)
    with torch.no_grad():
        want = forward(model, inputs)
        integration.enable(model)
        model.fuse_qkv_projections()
        integration.enable(model)
        torch.testing.assert_close(forward(model, inputs), want)
        integration.disable(model)
        model.unfuse_qkv_projections()
        assert torch.equal(forward(model, inputs), want)
    assert classes_in(model) == stock


def test_processors_set_after_enable(flux) -> None:
    model, inputs = flux
    stock = classes_in(model)
    with torch.no_grad():
        want = forward(model, inputs)
        report = integration.enable(model)
        model.set_attn_processor({name: stock[0]() for name in model.attn_processors})
        assert torch.equal(forward(model, inputs), want)
        assert set(report.calls.values()) == {0}
        again = integration.enable(model)
        model.set_attn_processor(model.attn_processors)
        assert torch.equal(forward(model, inputs), want)
        assert again.calls["fused"] == len(stock)
        integration.disable(model)
    assert classes_in(model) == stock


def test_state_dict_round_trip(flux, tmp_path) -> None:
    model, inputs = flux
    keys = list(model.state_dict())
    with torch.no_grad():
        want = forward(model, inputs)
        integration.enable(model)
        assert list(model.state_dict()) == keys
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        assert torch.equal(forward(loaded, inputs), want)
        other = prepared(MODELS["FluxTransformer2DModel"], seed=1)[0]
        integration.enable(other)
        other.load_state_dict(model.state_dict())
        assert torch.equal(forward(other, inputs), want)


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "SanaWMTransformer3DModel"])
def test_hooks_of_accelerate_that_come_after_enable(name) -> None:
    """A hook holds a module's forward. After `disable` that forward runs the host's code."""
    accelerate = pytest.importorskip("accelerate", reason="the diffusers extra is not installed")
    model, inputs = prepared(MODELS[name])
    with torch.no_grad():
        want = forward(model, inputs)
        report = integration.enable(model)
        for module in model.modules():
            accelerate.hooks.add_hook_to_module(module, accelerate.hooks.ModelHook())
        assert torch.equal(forward(model, inputs), want)
        calls = report.calls
        assert calls["jitrope"] + calls.get("fused", 0) > 0
        integration.disable(model)
        assert torch.equal(forward(model, inputs), want)
        assert report.calls == calls
        accelerate.hooks.remove_hook_from_module(model, recurse=True)
        assert torch.equal(forward(model, inputs), want)
        assert report.calls == calls


def test_sharding_that_derives_classes_is_not_undone() -> None:
    """`fully_shard` gives a module a class that is derived from the twin; the module keeps that class."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    model, inputs = prepared(MODELS["SanaWMTransformer3DModel"])
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        with torch.no_grad():
            want = forward(model, inputs)
            integration.enable(model)
            parts = [part for part in integration._parts(model) if isinstance(part, torch.nn.Module)]
            for module in (*parts, model):
                fully_shard(module, mesh=mesh)
            for change in (lambda _: None, integration.disable, integration.enable):
                change(model)
                assert parts
                assert all(isinstance(part, FSDPModule) for part in parts)
                assert torch.equal(forward(model, inputs), want)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "fuse_norm"),
    [("QwenImageTransformer2DModel", True), ("WanTransformer3DModel", False), ("Ideogram4Transformer2DModel", True)],
)
def test_exported(name, fuse_norm) -> None:
    model, inputs = prepared(MODELS[name])
    with torch.no_grad(), integration.enable(model, fuse_norm=fuse_norm):
        want = forward(model, inputs)
        exported = torch.export.export(model, (), inputs, strict=False)
        operations = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
        torch.testing.assert_close(forward(exported.module(), inputs), want)
    assert any(operation.startswith("jitrope.") for operation in operations)


# ---- other libraries that replace a processor's `__call__` in its class --------------------------------


def patched(cls, seen):
    """A function of another module for the host's class, like cache-dit's under context parallelism.

    It is the host's code with a change elsewhere, as in cache-dit.
    """
    original = cls.__call__
    source = "from diffusers.models.transformers.transformer_wan import *\n"
    names = {**original.__globals__, "__name__": "cache_something", "seen": seen}
    exec(source, names)
    copy_of = FunctionType(original.__code__, names, "__call__", original.__defaults__, original.__closure__)
    dispatch = names["dispatch_attention_fn"]

    def counted(*arguments, **words):
        seen.append("attention")
        return dispatch(*arguments, **words)

    names["dispatch_attention_fn"] = counted
    copy_of.__module__ = "cache_something"
    return copy_of


def test_a_patch_before_enable_is_kept(wan, monkeypatch) -> None:
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    model, inputs = wan
    seen: list[str] = []
    with torch.no_grad():
        stock = forward(model, inputs)
        monkeypatch.setattr(WanAttnProcessor, "__call__", patched(WanAttnProcessor, seen))
        with integration.enable(model) as report:
            assert torch.equal(forward(model, inputs), stock)
    assert report.calls == {"jitrope": MODELS["WanTransformer3DModel"].rotations, "host": 0}
    assert len(seen) == len(model.attn_processors)


def test_a_patch_after_enable_is_kept(wan, monkeypatch) -> None:
    """The patch gets the calls, and the report names it. After another `enable` both work together."""
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    model, inputs = wan
    seen: list[str] = []
    count = len(model.attn_processors)
    with torch.no_grad():
        stock = forward(model, inputs)
        with integration.enable(model) as report:
            monkeypatch.setattr(WanAttnProcessor, "__call__", patched(WanAttnProcessor, seen))
            assert torch.equal(forward(model, inputs), stock)
            assert report.calls == {"jitrope": 0, "host": count}
            assert len(seen) == count
            assert any("enable again" in reason for reason in report.reasons)
            again = integration.enable(model)
            assert torch.equal(forward(model, inputs), stock)
            assert again.calls == {"jitrope": MODELS["WanTransformer3DModel"].rotations, "host": 0}
            assert len(seen) == 2 * count
    assert all(type(p) is WanAttnProcessor for p in model.attn_processors.values())


@pytest.mark.slow
def test_a_patch_after_compilation_is_noticed(wan, monkeypatch) -> None:
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    model, inputs = wan
    torch._dynamo.reset()
    with torch.no_grad(), integration.enable(model, fuse_norm=False):
        stock = forward(model, inputs)
        compiled = torch.compile(model, backend="eager")
        forward(compiled, inputs)
        original = WanAttnProcessor.__call__

        def negative(self, *arguments, **words):
            return -original(self, *arguments, **words)

        monkeypatch.setattr(WanAttnProcessor, "__call__", negative)
        want = forward(model, inputs)
        assert not torch.allclose(want, stock)
        torch.testing.assert_close(forward(compiled, inputs), want)


def test_a_patch_that_hides_the_rope_is_left_and_named(wan, monkeypatch) -> None:
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    model, _ = wan
    original = WanAttnProcessor.__call__

    @functools.wraps(original)
    def wrapper(self, *arguments, **words):
        return original(self, *arguments, **words)

    wrapper.__module__ = "cache_something"
    monkeypatch.setattr(WanAttnProcessor, "__call__", wrapper)
    with pytest.raises(jitrope.JitropeError, match="its __call__ is cache_something's"):
        integration.enable(model)


def test_a_hooked_forward_is_left_and_named() -> None:
    """Sana-WM rotates in modules' `forward`. A hook on the module itself has already replaced it."""
    model, _ = prepared(MODELS["SanaWMTransformer3DModel"])
    modules = [m for m in model.modules() if type(m).__name__ in sites.SITES]
    for module in modules[1:]:
        module.forward = functools.partial(type(module).forward, module)
    with integration.enable(model) as report:
        assert report.replaced.total() == 1
        hooked = {type(m).__name__ for m in modules[1:]}
        assert {name for name in report.left if name in sites.SITES} == hooked
        assert all("hooked" in report.notes[name] for name in hooked)
    assert not any(hasattr(type(m), "_jitrope_host") for m in model.modules())


# ---- offload and parallelism ---------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offload", ["block_level", "leaf_level"])
@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "WanTransformer3DModel"])
def test_group_offload(name, offload, device) -> None:
    """On a CPU the hooks run, but move nothing. The host's own code calls norms that have a hook."""
    model, inputs = prepared(MODELS[name], device)
    with torch.no_grad():
        words = {"num_blocks_per_group": 1} if offload == "block_level" else {}
        model.enable_group_offload(torch.device(device), offload_type=offload, **words)
        stock = forward(model, inputs)  # with weights where offloading puts them: cuBLAS depends on addresses
        for fuse_norm in (False, True):
            fused = fuse_norm and offload == "block_level"
            with integration.enable(model, fuse_norm=fuse_norm) as report:
                out = forward(model, inputs)
            if fused and device == "cuda":  # there, squares of fp32 are summed in another order
                torch.testing.assert_close(out, stock, rtol=1e-4, atol=1e-5)
            else:
                assert torch.equal(out, stock)
            calls = {"jitrope": 0, "host": 0, "fused": FUSED_CALLS[name]}
            assert report.calls == (calls if fused else {"jitrope": MODELS[name].rotations, "host": 0})


CONTEXT_PARALLEL = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing
torch.accelerator.device_count = lambda: 2  # diffusers asks for it even where gloo and a CPU do
import diffusers
from jitrope.integrations import diffusers as integration
from jitrope.integrations.diffusers import fused
from tests.diffusion_zoo import MODELS, prepared

written = []  # one for each attention whose q, k and v were written as they are sent
sent = fused.sent
fused.sent = lambda *given, **words: written.append(1) or sent(*given, **words)

def work(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for name, self_attentions in (("Flux", 3), ("Wan", 2), ("QwenImage", 2)):
        check(f"{name}Transformer{2 + (name == 'Wan')}DModel", self_attentions)
    dist.destroy_process_group()

def check(name, self_attentions):
    model, inputs = prepared(MODELS[name])
    if "Qwen" in name:  # diffusers needs equal parts of the text, and a mask would be left to it
        inputs.update(encoder_hidden_states=inputs["encoder_hidden_states"][:, :6], encoder_hidden_states_mask=None)
    with torch.no_grad():
        alone = model(**inputs, return_dict=False)[0]
        model.set_attention_backend("native")
        model.enable_parallelism(config=diffusers.ContextParallelConfig(ulysses_degree=2))
        stock = model(**inputs, return_dict=False)[0]
        for fuse_norm in (False, True):
            written.clear()
            with integration.enable(model, fuse_norm=fuse_norm) as report:
                assert torch.equal(model(**inputs, return_dict=False)[0], stock)
            assert len(written) == fuse_norm * self_attentions, written
            assert report.calls["host"] == 0, report
            assert report.calls["jitrope"] == (0 if fuse_norm else MODELS[name].rotations), report
    torch.testing.assert_close(stock, alone)
    assert all(p._parallel_config is not None for p in model.attn_processors.values() if hasattr(p, "_parallel_config"))

if __name__ == "__main__":
    torch.multiprocessing.start_processes(work, (sys.argv[1],), nprocs=2, start_method="fork")  # diffusers is there
"""


@pytest.mark.slow
def test_context_parallel(tmp_path) -> None:
    """Two processes with Ulysses: diffusers' hooks split the tables, and rope runs on a rank's rows. With fused norms
    it writes q, k and v in the order of the ranks."""
    script = tmp_path / "work.py"
    script.write_text(CONTEXT_PARALLEL)
    run(script, tmp_path / "store", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("own", [False, True], ids=["common tables", "own tables"])
def test_what_ulysses_sends(device, own) -> None:
    """The bits of the launch that joins two streams, or of the call of one: a group of heads for each rank."""
    tables = [tuple(t.to(device) for t in full_tables(n, 64)) for n in (5, 6, 11)]
    ropes = [{"cos": cos, "sin": sin, "interleaved": True} for cos, sin in tables]
    streams = [[torch.randn(2, n, 4, 64, device=device).bfloat16() for _ in "qkv"] for n in (5, 6)]
    weights = [torch.rand(64, device=device).bfloat16() for _ in range(4)]
    found = norms.Norms(weights, {"eps": 1e-6, "rounding": "twice"})
    rope = norms.beside(*ropes[:2]) if own else ropes[2]
    with torch.no_grad():
        got = ulysses.sent(found, streams, rope, 2)
        want = norms.joint(found, *streams, rope)
        assert all(torch.equal(x, torch.stack(y.chunk(2, 2))) for x, y in zip(got, want))
        assert all(x.is_contiguous() for x in got)
        got = ulysses.sent(found, streams[:1], ropes[0], 4)
        want = *norms.norm_rope(found, *streams[0][:2], ropes[0]), streams[0][2]
        assert all(torch.equal(x, torch.stack(y.chunk(4, 2))) for x, y in zip(got, want))


@pytest.mark.parametrize("name", ["QwenImageTransformer2DModel", "WanTransformer3DModel"])
def test_lora(name) -> None:
    """Adapters stay in the projections of q, k and v, and get gradients."""
    peft = pytest.importorskip("peft", reason="the test extra is not installed")
    model, inputs = prepared(MODELS[name])
    with torch.no_grad():
        alone = forward(model, inputs)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    model.add_adapter(peft.LoraConfig(r=4, init_lora_weights=False, target_modules=targets))
    with torch.no_grad():
        stock = forward(model, inputs)
        with integration.enable(model) as report:
            assert torch.equal(forward(model, inputs), stock)
    assert not torch.equal(stock, alone)
    assert report.calls["host"] == 0
    assert report.calls["fused"] > 0
    with integration.enable(model):
        forward(model, inputs).square().sum().backward()
    adapters = [p for key, p in model.named_parameters() if "lora" in key and p.requires_grad]
    assert adapters
    assert all(p.grad is not None for p in adapters)
