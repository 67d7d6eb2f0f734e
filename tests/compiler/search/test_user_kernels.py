"""A user's kernel serves where it is right and faster, and is refused where it is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dovetail import kernels
from dovetail.cli.kernel import build_command
from dovetail.cli.tune import describe_kernel
from dovetail.codegen.library import build_library, index_library
from dovetail.codegen.targets import host_target
from dovetail.compiler.measure.database import TuningDatabase
from dovetail.compiler.measure.meter import CallCase, Meter, RowsCase
from dovetail.compiler.measure.recorder import Identity, Recorder
from dovetail.compiler.measure.row_ops import ROW_OPS
from dovetail.compiler.pipeline import compile_model
from dovetail.compiler.rules.tables import other_tables
from dovetail.compiler.search.instances import apply_choices, search_instances
from dovetail.compiler.search.user_kernels import (
    our_request,
    read_user_kernel,
    read_user_kernels,
    user_library,
    user_tasks,
)
from dovetail.compiler.tune.kernel import tune_kernel
from dovetail.ir.errors import SpecError
from dovetail.ir.schedule import ScheduleFile
from dovetail.ir.tuning import RecordSet
from dovetail.topology.hardware import read_hardware
from tests.compiler.records import TrustingRecords
from tests.compiler.search.test_attention_search import SPEC
from tests.compiler.virtual import VirtualMeter, use_virtual_meters
from tests.dovetail.commands import dovetail
from tests.models import save_model

TARGET = host_target()
RMSNORM = """
#include <math.h>
void rmsnorm(float *o, float *x, float *weight, int size) {
  float ss = 0.0f;
  for (int j = 0; j < size; j++) ss += x[j] * x[j];
  ss = 1.0f / sqrtf(ss / size + 1e-5f);
  for (int j = 0; j < size; j++) o[j] = weight[j] * (ss * x[j]);
}
"""
KERNELS = {
    "rmsnorm": RMSNORM,
    "layernorm": """
#include <math.h>
void layernorm(float *out, const float *in, const float *bias, const float *weight, int n) {
  float m = 0.0f, v = 0.0f;
  for (int i = 0; i < n; i++) m += in[i];
  m /= n;
  for (int i = 0; i < n; i++) { float d = in[i] - m; v += d * d; }
  float s = 1.0f / sqrtf(v / n + 1e-5f);
  for (int i = 0; i < n; i++) out[i] = (in[i] - m) * s * weight[i] + bias[i];
}
""",
    "softmax": """
#include <math.h>
void softmax(float *x, int size) {
  float top = x[0], sum = 0.0f;
  for (int i = 1; i < size; i++) if (x[i] > top) top = x[i];
  for (int i = 0; i < size; i++) { x[i] = expf(x[i] - top); sum += x[i]; }
  for (int i = 0; i < size; i++) x[i] /= sum;
}
""",
    "silu_mul": """
#include <math.h>
void glu(float *out, const float *gate, const float *up, int n) {
  for (int i = 0; i < n; i++) out[i] = gate[i] * (1.0f / (1.0f + expf(-gate[i]))) * up[i];
}
""",
}
OURS = """
@kernel
def rmsnorm(T: i64, H: i64, x: ptr[f32], ldx: i64, w: ptr[f32], eps: f32, out: ptr[f32], ldo: i64,
            tid: thread, nth: thread):
    for t in range(T * tid // nth, T * (tid + 1) // nth):
        acc = vzero()
        for c in vrange(H):
            v = vload(x + t * ldx + c)
            acc = vfma(v, v, acc)
        s = vbroadcast(1.0 / sqrt(vreduce_add(acc) / cast(f32, H) + eps))
        for c in vrange(H):
            vstore(out + t * ldo + c, vmul(vload(w + c), vmul(s, vload(x + t * ldx + c))))
"""
FUSED = """
@kernel
def squared_relu(n: i64, x: ptr[f32], y: ptr[f32]):
    for i in vrange(n):
        v = vmax(vload(x + i), vzero())
        vstore(y + i, vmul(v, v))
"""


@pytest.fixture(autouse=True)
def whatever_else_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times count on a busy machine, too: else a kernel may be told to have no times."""
    monkeypatch.setattr(RecordSet, "trusts", TrustingRecords.trusts)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_every_variant_is_right(tmp_path: Path) -> None:
    """Ours and all of the user's, on rows of a length that no tile divides."""
    files = {op: write(tmp_path, f"{op}_c.c", text) for op, text in KERNELS.items()}
    users = [read_user_kernel(f"{op}={file}") for op, file in files.items()]
    users.append(read_user_kernel(f"rmsnorm={write(tmp_path, 'own.dk', OURS)}"))
    assert len(users[-1].unit.functions) == 1  # taken as it is
    built = build_library(user_library(users, TARGET))
    with Meter(built.path, built.index, pool_bytes=1 << 20) as meter:
        for user in users:
            case = RowsCase(kind=user.op, rows=3, width=45, threads=2)
            (task,) = user_tasks(user, TARGET, [case])
            found = meter.measure(case, task.candidates, rounds=2, seconds=0.0)
            assert [m.status for m in found] == ["ok"] * (4 + bool(ROW_OPS[user.op].ours)), user.op


def test_files_of_one_name_are_kept_apart_or_refused(tmp_path: Path) -> None:
    files = []
    for op in ("rmsnorm", "silu_mul"):
        (tmp_path / op).mkdir()
        files.append(write(tmp_path / op, "own.c", KERNELS[op]))
    users = read_user_kernels([f"rmsnorm={files[0]}", f"silu_mul={files[1]}"])
    index = build_library(user_library(users, TARGET)).index
    assert {"rmsnorm_user_own", "silu_mul_user_own"} <= {k.name for k in index.kernels}
    with pytest.raises(SpecError, match="two files, are called own"):
        read_user_kernels(map(str, files))


@pytest.mark.parametrize(
    "text",
    [RMSNORM.replace("1e-5f", "1e-3f"), RMSNORM.replace("ss * x[j])", "ss * x[0])")],
    ids=["another eps", "another element"],
)
def test_a_wrong_kernel_is_refused(text: str, tmp_path: Path) -> None:
    file, database = write(tmp_path, "own.c", text), tmp_path / "db.jsonl"
    with pytest.raises(SpecError, match=r"own\.c as rmsnorm .* is refused: its numbers differ"):
        tune_kernel(f"rmsnorm={file}", ["rows=2,width=40"], database=database, budget=0.1)


def test_a_kernel_that_leaves_out_rows_is_wrong(tmp_path: Path) -> None:
    """Where threads do not divide their number: what is timed often is a power of two."""
    even = "T // nth * tid, T // nth * (tid + 1)"
    text = OURS.replace("T * tid // nth, T * (tid + 1) // nth", even)
    user = read_user_kernel(f"rmsnorm={write(tmp_path, 'own.dk', text)}")
    built = build_library(user_library([user], TARGET))
    case = RowsCase(kind=user.op, rows=16, width=64, threads=2)
    (task,) = user_tasks(user, TARGET, [case])
    with Meter(built.path, built.index, pool_bytes=1 << 20) as meter:
        found = meter.measure(case, task.candidates, rounds=2, seconds=0.0)
    assert [m.status for m in found] == ["ok", *["wrong"] * (len(found) - 1)] and len(found) > 1


def test_tuning_keeps_its_records(tmp_path: Path) -> None:
    file, database = write(tmp_path, "own.c", RMSNORM), tmp_path / "db.jsonl"
    shapes = ["rows=2,width=40", "rows=9,width=100"]
    first = tune_kernel(str(file), shapes, database=database, budget=0.1, threads=1)
    assert (first.op, first.measured, len(first.rows)) == ("rmsnorm", 10, 2)
    assert first.rows[1].variant.startswith("rmsnorm_user_own")
    assert first.rows[1].gbytes == pytest.approx(4e-9 * 100 * 19 / first.rows[1].best)
    assert "GB/s)" in describe_kernel(first)
    assert database.read_bytes().count(b"\n") == 10


GEMV = """
#include <immintrin.h>
void rows(int n, const float *x, const float *w, float *out) {
  __m256 a = _mm256_setzero_ps(), b = _mm256_setzero_ps();
  while (n != 0) {
    const __m256 s = _mm256_broadcast_ss(x);
    x += 1;
    a = _mm256_fmadd_ps(s, _mm256_loadu_ps(w), a);
    b = _mm256_fmadd_ps(s, _mm256_loadu_ps(w + 8), b);
    w += 16;
    n -= 1;
  }
  _mm256_storeu_ps(out, a);
  _mm256_storeu_ps(out + 8, b);
}
"""
DOUBLED = """
@kernel
def doubled(n: i64, x: ptr[f32], y: ptr[f32]):
    TIMES: param = choice(2, 3, default=2)
    for i in vrange(n):
        vstore(y + i, vmul(vbroadcast(cast(f32, TIMES)), vload(x + i)))
"""


def measured(file: Path, **sizes: int) -> dict[str, str]:
    """How each variant of a kernel that is no operator does, by its name."""
    user = read_user_kernel(str(file), guess=True)
    case = CallCase(kind=user.requests[0].name, sizes=tuple(sizes.items()), threads=1)
    (task,) = user_tasks(user, TARGET, [case])
    built = build_library(user_library([user], TARGET))
    with Meter(built.path, built.index, pool_bytes=1 << 20) as meter:
        found = meter.measure(case, task.candidates, rounds=2, seconds=0.0)
    return {m.candidate.kernel: m.status for m in found}


AROUND = """
#include "kinds.h"
#include "sizes.h"
#define TIMES 2
#include "body.inc"
#undef TIMES
#define TIMES 3
#include "body.inc"
"""
"""C that needs a prelude and a folder, and reads one file twice."""
FILES = {
    "prelude.h": "#define NAME(a, b) PASTE(a, b)\n#define PASTE(a, b) a ## b\n",
    "headers/kinds.h": "#ifndef KINDS\n#define KINDS\ntypedef float real;\n#endif\n",
    "headers/sizes.h": '#pragma once\n#include "kinds.h"\n#include "sizes.h"\n',
    "headers/body.inc": """
static void NAME(by, TIMES)(real *out, const real *in, int n) {
  for (int i = 0; i < n; i++) out[i] = TIMES * in[i];
}
""",
}
CALLS = """
#include <math.h>
void silu(float *o, const float *x, int n) {
  by2(o, x, n);
  for (int i = 0; i < n; i++) o[i] = 0.5f * o[i] / (1.0f + expf(-x[i]));
}
"""


def test_c_with_macros_and_headers_is_tuned_and_compiled(tmp_path: Path) -> None:
    (tmp_path / "headers").mkdir()
    for name, text in FILES.items():
        write(tmp_path, name, text)
    file, database = write(tmp_path, "own.c", AROUND + CALLS), tmp_path / "db.jsonl"
    around = ("--prelude", tmp_path / "prelude.h", "-I", tmp_path / "headers")
    shape = ("--shape", "rows=2,width=40", "--db", database, "--budget", "0.1s")
    told = dovetail("tune", "--kernel", file, *shape, *around)
    assert told.code == 0 and told.out.startswith(f"silu of {file}"), told
    assert dovetail("tune", "--kernel", file, *shape).code == 2
    model, out = save_model(tmp_path / "model", "llama"), tmp_path / "app.dove"
    text = AROUND + "void third(real *out, real *in, int n) { by3(out, in, n); }"
    given = ("--kernel", write(tmp_path, "third.c", text), *around, "--effort", "none")
    result = dovetail("compile", model, "-o", out, *given)
    assert result.code == 0, result.err
    x, y = np.arange(7, dtype=np.float32), np.zeros(7, np.float32)
    kernels(out)["third"](y, x, 7)
    assert np.array_equal(y, 3 * x)
    command = json.loads((out / "manifest.json").read_text())["command"]
    assert {f"--prelude={around[1]}", f"--include={around[3]}"} <= set(command)


HELPED = """
#include <math.h>
#include <stdio.h>
static float silu(float x) { return x / (1.0f + expf(-x)); }
static void say(const char *text) { puts("never called"); }
void gated(float *out, const float *x, const float *y, int n) {
  for (int i = 0; i < n; i++) out[i] = silu(x[i]) * y[i];
}
int main(int argc, char **argv) { say("x"); }
"""


def test_helpers_are_no_kernels(tmp_path: Path) -> None:
    """Neither one that is called as an operator, nor what is no C of ours and not asked for."""
    file = write(tmp_path, "own.c", HELPED)
    assert read_user_kernel(str(file), guess=True).requests[0].name == "gated"
    assert read_user_kernel(f"silu_mul={file}").requests[0].name == "silu_mul_user_own"
    build_command(file, tmp_path / "out", kernel=["gated"])
    x, out = np.linspace(-3, 3, 37, dtype=np.float32), np.zeros(37, np.float32)
    kernels(tmp_path / "out")["gated"](out, x, x, 37)
    assert np.allclose(out, x * x / (1 + np.exp(-x)), 1e-5, 1e-6)


def test_an_operator_that_the_rest_of_a_program_calls_is_found(tmp_path: Path) -> None:
    program = 'void step(float *x) { puts("step"); rmsnorm(x, x, x, 8); }'
    file = write(tmp_path, "run.c", RMSNORM + program)
    assert read_user_kernel(f"rmsnorm={file}").requests[0].name == "rmsnorm_user_run"


SHARED = """
@kernel
def shifted(n: i32, by: f64, x: ptr[f32], y: ptr[f32], tid: thread, nth: thread):
    for i in vrange(n * tid // nth, n * (tid + 1) // nth):
        vstore(y + i, vadd(vload(x + i), vbroadcast(cast(f32, by))))
"""


def test_numbers_of_any_type_are_taken_and_threads_share_what_can_be_shared(tmp_path: Path) -> None:
    file, database = write(tmp_path, "own.dk", SHARED), tmp_path / "db.jsonl"
    usual = {"database": database, "budget": 0.1}
    found = tune_kernel(str(file), ["n=3700,by=2"], **usual)
    assert (found.op, found.rows[0].shape, found.notes) == ("shifted", {"n": 3700, "by": 2}, ())
    assert {r.threads for r in TuningDatabase(database)} == {read_hardware().usable_threads}
    alone = tune_kernel(str(write(tmp_path, "alone.c", GEMV)), ["n=37"], threads=2, **usual)
    assert alone.notes[0].startswith("rows takes no tid and nth")
    with pytest.raises(SpecError, match="cannot bind 0 threads"):
        tune_kernel(str(file), ["n=1,by=2"], threads=0, **usual)
    with pytest.raises(SpecError, match="cannot bind 99999 threads"):  # though it uses one alone
        tune_kernel(str(tmp_path / "alone.c"), ["n=37"], threads=99_999, **usual)


@pytest.mark.parametrize(("size", "said"), [(999_999_999, "beyond the 16 MiB"), (5, "crashes. ")])
def test_arrays_that_are_too_small_are_told_apart_from_a_fault(
    tmp_path: Path, size: int, said: str
) -> None:
    """The second one is at fault itself: it begins far before its array."""
    first = "i" if size > 5 else "i - 4000000000000"
    text = f"void f(int n, float *x) {{ for (long i = 0; i < n; i++) x[{first}] = 1.0f; }}"
    with pytest.raises(SpecError, match=f"is refused: it.* {said}"):
        tune_kernel(
            str(write(tmp_path, "own.c", text)),
            [f"n={size}"],
            database=tmp_path / "db.jsonl",
            budget=0.1,
        )


@pytest.mark.parametrize("shape", ["rows=1,rows=2,width=3", "n=1,n=1", "rows=1;width=2", "rows=-1"])
def test_a_shape_names_each_number_once(shape: str, tmp_path: Path) -> None:
    file = write(tmp_path, "own.c", RMSNORM)
    with pytest.raises(SpecError, match="each name once"):
        tune_kernel(str(file), [shape], database=tmp_path / "db.jsonl")


def test_width_and_unrolling_of_a_kernel_that_is_no_operator_are_tuned(tmp_path: Path) -> None:
    file, database = write(tmp_path, "own.c", GEMV), tmp_path / "db.jsonl"
    names = ("rows", "rows_lanes8", "rows_unroll2", "rows_unroll4", "rows_unroll8")
    assert measured(file, n=37) == measured(file, n=1) == dict.fromkeys(names, "ok")
    found = tune_kernel(str(file), ["n=3700"], database=database, budget=0.1)
    assert (found.op, found.rows[0].shape, found.rows[0].ours) == ("rows", {"n": 3700}, None)
    with pytest.raises(SpecError, match=r"own\.c needs n=N, each a whole number"):
        tune_kernel(str(file), ["rows=1,width=2"], database=database)


def test_a_variant_with_other_numbers_is_wrong(tmp_path: Path) -> None:
    found = measured(write(tmp_path, "own.dk", DOUBLED), n=50)
    assert found == {
        "doubled": "ok",
        "doubled_times3": "wrong",
        **dict.fromkeys((f"doubled_unroll{n}" for n in (2, 4, 8)), "ok"),
    }


def test_helpers_may_be_called_as_the_functions_that_fitting_adds(tmp_path: Path) -> None:
    text = KERNELS["silu_mul"].replace("void glu", HELPERS + "void silu_mul")
    text = text.replace("gate[i] * (", "user_row(user_rows(gate[i])) * (")
    user = read_user_kernel(f"silu_mul={write(tmp_path, 'own.c', text)}")
    names = [function.name for function in user.unit.functions]
    assert len(set(names)) == len(names) and user.gates


HELPERS = """
static float user_row(float x) { return x; }
static float user_rows(float x) { return x; }
"""


def test_what_tuning_found_can_be_built(tmp_path: Path) -> None:
    file = write(tmp_path, "own.c", GEMV)
    build_command(file, tmp_path / "out", bind=["UNROLL=4", "LANES=8"])
    x, w = np.random.default_rng(0).standard_normal((2, 16 * 13)).astype(np.float32)
    out = np.zeros(16, np.float32)
    kernels(tmp_path / "out")["rows"](13, x, w, out)
    assert np.allclose(out, x[:13].astype(np.float64) @ w.reshape(13, 16), 1e-4, 1e-5)


def test_what_is_surely_faster_gets_into_the_tables(tmp_path: Path) -> None:
    user = read_user_kernel(f"rmsnorm={write(tmp_path, 'own.c', RMSNORM)}")
    tasks = user_tasks(user, TARGET, [RowsCase(kind="rmsnorm", rows=1, width=64, threads=1)])
    index = index_library(user_library([user], TARGET))
    identity = Identity.of(read_hardware(), index)
    for fastest in (user.requests[2].name, "rmsnorm"):
        meter = Favouring(Path(__file__), index, pool_bytes=1)
        meter.fastest = fastest
        found = search_instances(tasks, Recorder(meter, identity, RecordSet()), 1.0)
        tables = apply_choices(other_tables(SPEC, TARGET, "any", 1), found)
        (table,) = (t for t in tables if t.op == "rmsnorm")
        assert table.rows[0].kernel == fastest
        served = [request.name for request in user.served(tables)]
        assert served == list(dict.fromkeys((user.requests[0].name, *user_names(fastest))))


def user_names(name: str) -> tuple[str, ...]:
    return (name,) if name != "rmsnorm" else ()


class Favouring(VirtualMeter):
    """A machine on which one kernel is the fastest."""

    fastest = "rmsnorm_user_own"

    def one(self, case, candidate, rounds):  # type: ignore[no-untyped-def]
        found = super().one(case, candidate, rounds)
        time = 1e-6 if candidate.kernel == self.fastest else 1e-4
        return msgspec.structs.replace(found, seconds=time, low=time, high=time)


def test_the_chosen_kernel_is_the_one_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's is wrong here, and let in: if ours ran in its place, nothing would differ."""
    import dovetail

    use_virtual_meters(monkeypatch)
    for module in ("dovetail.compiler.search.choose", "dovetail.compiler.tune.model"):
        monkeypatch.setattr(f"{module}.Meter", Favouring)
    model = save_model(tmp_path / "model", "llama")
    usual = {"budget": 1.0, "threads": 1}
    zeros = RMSNORM.replace("weight[j] * (ss * x[j])", "0.0f * ss")
    tokens = {}
    for name, text in (("right", RMSNORM), ("zeros", zeros)):
        (tmp_path / name).mkdir()
        file = write(tmp_path / name, "own.c", text)
        out = tmp_path / name / "app.dove"
        usual["database"] = file.with_name("db.jsonl")  # or the first has spent the seconds
        compile_model(model, output=out, kernels=[f"rmsnorm={file}"], **usual)
        tables = msgspec.json.decode(
            (out / "models/llm/schedules.json").read_bytes(), type=ScheduleFile
        )
        named = {t.rows[0].kernel for t in tables.tables if t.op == "rmsnorm"}
        assert named == {"rmsnorm_user_own"}
        with dovetail.load(out, threads=1, trust=True) as app:
            tokens[name] = app.generate([[1, 2, 3]], max_tokens=6, ignore_eos=True)[0].token_ids
    assert len(set(tokens["zeros"])) == 1 and tokens["zeros"] != tokens["right"]


def test_an_operator_of_ones_own_is_called_by_numpy_and_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("tvm_ffi")
    model, out = save_model(tmp_path / "model", "llama"), tmp_path / "app.dove"
    file = write(tmp_path, "fused.dk", FUSED)
    compile_model(model, output=out, effort="none", kernels=[str(file)])
    call = kernels(out)["squared_relu"]
    x = np.linspace(-2, 3, 77, dtype=np.float32)
    y, t = np.zeros_like(x), torch.zeros(77)
    call(77, x, y)
    call(77, torch.from_numpy(x), t)
    assert np.array_equal(y, np.maximum(x, 0) ** 2) and np.array_equal(t.numpy(), y)


def test_an_operator_of_ones_own_is_called_by_jax(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    build_command(write(tmp_path, "fused.dk", FUSED), tmp_path / "out")
    x, y = jax.numpy.linspace(-2, 3, 77), jax.numpy.zeros(77)
    kernels(tmp_path / "out")["squared_relu"](77, x, y)
    assert np.array_equal(y, np.maximum(x, 0) ** 2)


@pytest.mark.parametrize(
    ("given", "text", "message"),
    [
        ("attend={}", RMSNORM, "no operator 'attend'; choose one of rmsnorm"),
        ("softmax={}", RMSNORM, "rmsnorm.* does not fit: one row of this operator is"),
        ("rmsnorm={}", "void f(float *x, int n) {} void g(float *x, int n) {}", "rename one to"),
        ("{}", "", "has no function"),
    ],
)
def test_what_does_not_fit_is_told(given: str, text: str, message: str, tmp_path: Path) -> None:
    file = write(tmp_path, "own.c", text)
    with pytest.raises(SpecError, match=message):
        read_user_kernels([given.format(file)])


def test_what_cannot_be_measured_does_not_serve(tmp_path: Path) -> None:
    model, out = save_model(tmp_path / "model", "llama"), tmp_path / "app.dove"
    for op, text, options in (
        ("rmsnorm", RMSNORM, {"effort": "none"}),
        ("softmax", KERNELS["softmax"], {}),
    ):
        given = f"{op}={write(tmp_path, 'own.c', text)}"
        with pytest.raises(SpecError, match=r"must be measured|no separate operator softmax"):
            compile_model(model, output=out, kernels=[given], **options)
    assert our_request("softmax", TARGET) is None and not out.exists()
