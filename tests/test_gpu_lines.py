"""Which lines of a package only a GPU reaches, read from small sources."""

from __future__ import annotations

from tests.support.gpu_lines.facts import lines_of_a_gpu
from tests.support.gpu_lines.reached import NOWHERE, Outside


def only_on_a_gpu(text: str, *, outside: Outside = NOWHERE, absent: tuple[str, ...] = ()) -> list[str]:
    """Return the lines of a module that only a GPU reaches. Further modules begin with `# module NAME`."""
    parts = text.split("# module ")
    modules = {"main": ("main", parts[0])}
    for part in parts[1:]:
        name, _, body = part.partition("\n")
        modules[name] = name, body
    found = lines_of_a_gpu(modules, ("main",), outside, absent)
    texts = {path: body.splitlines() for path, body in modules.values()}
    return [texts[path][line - 1].strip() for path, one in found.items() for line in sorted(one.lines)]


def test_a_branch_and_what_follows_an_early_end() -> None:
    text = """
def one(device):
    if device.type == "cuda":
        a = 1
    elif other:
        b = 2
    if device.type != "cuda" or other:
        return
    c = 3
one(x)
"""
    assert only_on_a_gpu(text) == ["a = 1", "c = 3"]


def test_what_only_such_lines_name() -> None:
    text = """
def shared():
    a = 1
def waits():
    b = 2
class Lane:
    def run(self):
        waits()
class Plain:
    def run(self):
        shared()
def make(device):
    return Lane() if device.type == "cuda" else Plain()
make(x).run()
"""
    assert only_on_a_gpu(text) == ["b = 2", "waits()"]


def test_values_that_follow() -> None:
    text = """
class Copies:
    def __init__(self, device, stream=None):
        gpu = device.type == "cuda"
        self._stream = stream if gpu else None
        self.other = stream
    @property
    def waits(self):
        return self._stream is not None
    def copy(self):
        if self._stream is not None and self.other:
            a = 1
        if self.waits:
            b = 2
        if self.other is None:
            c = 3
        if not pins(self.device):
            return
        d = 4
def pins(device):
    return device.type == "cuda"
Copies(x, y).copy()
"""
    assert only_on_a_gpu(text) == ["a = 1", "b = 2", "d = 4"]


def test_parameters_have_the_values_of_all_calls() -> None:
    text = """
def host(pages, pinned):
    if pinned:
        a = 1
def both(pinned):
    if pinned:
        b = 2
def passed_on(pinned):
    if pinned:
        c = 3
def used_elsewhere(pinned):
    if pinned:
        d = 4
host(5, pinned=device.type == "cuda")
both(device.type == "cuda")
both(True)
run(passed_on)
used_elsewhere(device.type == "cuda")
"""
    assert only_on_a_gpu(text, outside=Outside(frozenset({("main", "used_elsewhere")}))) == ["a = 1"]


def test_an_argument_that_is_called_on_a_gpu_only() -> None:
    text = """
def size(device, largest):
    if device.type != "cuda":
        return 0
    return largest()
def run():
    a = 1
def other():
    b = 2
size(device, lambda: run())
call(lambda: other())
"""
    assert only_on_a_gpu(text) == ["return largest()", "a = 1"]


def test_modules_that_are_imported_on_a_gpu_only() -> None:
    text = """
def attend(name, device):
    if name == "fast":
        from fast import Fast
        return Fast()
    if device.type == "cuda":
        import kernels
        kernels.run()
    import plain
    plain.run()
attend(x, y)
# module fast
class Fast:
    a = 1
# module kernels
def run():
    b = 2
# module plain
def run():
    c = 3
"""
    found = only_on_a_gpu(text, absent=("fast",))
    assert found == [
        "from fast import Fast", "return Fast()", "import kernels", "kernels.run()", "class Fast:", "a = 1",
        "def run():", "b = 2",
    ]  # fmt: skip


def test_an_object_of_a_class_that_is_never_made_is_no_instance() -> None:
    text = """
class Lane: pass
def copies(lane):
    if isinstance(lane, Lane):
        a = 1
    if isinstance(lane, Other):
        b = 2
copies(Lane() if device.type == "cuda" else None)
"""
    assert only_on_a_gpu(text) == ["a = 1"]


def test_the_interpreter_is_off_and_kernels_are_counted_apart() -> None:
    text = """
@triton.jit
def kernel(x):
    a = 1
def launch(x):
    kernel[(1,)](x)
def runs_on(device):
    return device.type == "cuda" or bool(triton.knobs.runtime.interpret)
if runs_on(device):
    launch(x)
"""
    (found,) = lines_of_a_gpu({"main": ("main", text)}, ("main",), NOWHERE, ()).values()
    assert (sorted(found.lines), sorted(found.kernels)) == ([6, 10], [4])


def test_what_runs_everywhere_or_nowhere_is_not_counted() -> None:
    text = """
def nowhere():
    a = 1
def everywhere(items):
    for one in items:
        match one:
            case 1 if one:
                b = 2
            case _:
                return
    try:
        c = 3
    except ValueError:
        d = 4
    with suppress(KeyError):
        return
    e = 5
everywhere(x)
"""
    assert only_on_a_gpu(text) == []


def test_fields_and_variables_of_outer_functions_may_be_anything() -> None:
    text = """
class Options(Struct):
    saver: bool = False
@dataclass
class More:
    other: bool = False
def run(options, more):
    taken = None
    def take():
        nonlocal taken
        taken = 1
    if options.saver:
        a = 1
    if more.other:
        b = 2
    if taken is not None:
        c = 3
run(Options(saver=True), More(True))
"""
    assert only_on_a_gpu(text) == []


def test_functions_of_equal_names_are_told_apart_by_their_modules() -> None:
    text = """
import trial
from other import unavailable
def pick(device):
    if device.type == "cuda":
        return trial.unavailable(device)
    return unavailable(device)
pick(x)
# module trial
def unavailable(device):
    a = 1
# module other
def unavailable(device):
    b = 2
"""
    assert only_on_a_gpu(text) == ["return trial.unavailable(device)", "a = 1"]


def test_functions_of_modules_that_are_passed_on() -> None:
    text = """
import kernels, plain
def pick(device):
    return kernels if device.type == "cuda" else plain
pick(x).draw()
import_module(f"of.{x}").draw()
def other(kernels):
    kernels.fill()
other(y)
# module kernels
def draw():
    a = 1
def fill():
    d = 4
# module plain
def draw():
    b = 2
# module of.one
def draw():
    c = 3
"""
    assert only_on_a_gpu(text) == ["a = 1", "d = 4"]


def test_a_lambda_is_read_beside_a_function_of_the_same_name_with_fewer_parameters() -> None:
    text = """
def short():
    def run():
        a = 1
    return run
def other():
    def run(then):
        then()
    return run
def wait():
    b = 2
def make(run, device):
    if device.type == "cuda":
        run(lambda: wait())
short()
make(other(), x)
"""
    assert only_on_a_gpu(text) == ["b = 2", "run(lambda: wait())"]
