"""Programs of a model run within limits, leave nothing behind, and cannot make up a verdict."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_kernels.training import sandbox
from grpo_kernels.training.sandbox import Case, Limits, check_assertions, check_output, check_test_code, require_sandbox
from grpo_kernels.training.sandbox_child.wire import decode, encode

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the sandbox needs POSIX and says so elsewhere")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="what seccomp and RLIMIT_AS enforce on Linux")

LIMITS = Limits(time_s=20.0, memory_mb=512, file_mb=4)
SHORT = Limits(time_s=1.0, memory_mb=512, file_mb=4)
MARK = "424242.25"  # seconds that nothing else sleeps


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every test here: no process and no temporary file outlives the check."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    folders, processes = list(tmp_path.glob("grpo-answer-*")), sandbox_processes()
    for process in processes:
        process.kill()
    # pytest could not remove what a failed test leaves a thousand folders deep.
    subprocess.run(["rm", "-rf", *folders], check=True)
    assert (folders, processes) == ([], [])


def sandbox_processes() -> list[psutil.Process]:
    """Live processes that a sandbox of this test process started, or that carry the mark."""
    mine = f'"parent": {os.getpid()},'
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if (mine in line or MARK in line) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


# --- input and output -------------------------------------------------------------------------------------------------


def test_output_is_compared_with_white_space_at_line_ends_aside():
    source = "a, b = map(int, input().split())\nprint(a + b, '')\nprint('done')\nprint()"
    assert check_output(source, [Case("1 2\n", "3\ndone"), Case("-5 5", "0\ndone\n\n")], LIMITS) == (True, "")
    assert check_output(source, [Case("1 2\n", "3\ndone"), Case("2 2", "5\ndone")], LIMITS) == (
        False,
        "case 2: wrong output",
    )
    assert not check_output("print(' 3')", [Case("", "3")], LIMITS).passed


@pytest.mark.parametrize(
    "source",
    [
        "import threading\nthreading.stack_size(64 << 20)\nt = threading.Thread(target=print, args=(4,))\nt.start()",
        "import asyncio\nasync def main(): print(4)\nasyncio.run(main())",
        "import pickle\nclass A: x = 4\nprint(pickle.loads(pickle.dumps(A())).x)",
        "import sys\nif __name__ == '__main__':\n    print(4)\n    sys.exit()",
        "open('notes', 'w').write('4')\nprint(open('notes').read())",
    ],
    ids=["thread", "asyncio", "pickle of its own class", "exit after output", "file of its own"],
)
def test_ordinary_programs_pass(source: str):
    assert check_output(source, [Case("", "4")], LIMITS) == (True, "")


def test_a_program_that_ends_with_an_error_fails_in_spite_of_its_output():
    verdict = check_output("print(4, flush=True)\nraise ValueError('no')", [Case("", "4")], LIMITS)
    assert verdict == (False, "case 1: exit code 1: ValueError: no")


def test_the_environment_of_the_caller_is_not_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    source = "import os\nprint('SECRET_TOKEN' in os.environ, os.environ['HOME'] == os.getcwd())"
    assert check_output(source, [Case("", "False True")], LIMITS).passed


def test_no_file_descriptor_of_the_caller_is_open(tmp_path: Path):
    with open(tmp_path / "open", "w") as file:
        os.set_inheritable(file.fileno(), True)
        source = (
            f"import os\ntry:\n    os.fstat({file.fileno()})\n    print('open')\nexcept OSError:\n    print('closed')"
        )
        assert check_output(source, [Case("", "closed")], LIMITS).passed


# --- attacks on the limits: each prints what is expected before it misbehaves -----------------------------------------


@pytest.mark.parametrize(
    "attack",
    [
        f"import time\ntime.sleep({MARK})",
        "while True: pass",
        "import os\nwhile True: os.write(1, b'4')",
        "import signal\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        f"import os, time\nos.close(0); os.close(1); os.close(2)\nos.closerange(3, 64)\ntime.sleep({MARK})",
        f"import threading, time\nthreading.Thread(target=time.sleep, args=({MARK},)).start()",
    ],
    ids=["sleep", "spin", "endless output", "signals ignored", "closed descriptors", "thread that stays"],
)
def test_endless_programs_are_ended(attack: str):
    assert not check_output(f"print(4, flush=True)\n{attack}", [Case("", "4")], SHORT).passed


@linux_only
@pytest.mark.parametrize(
    "attack",
    [
        f"import time\nfor _ in range(20):\n    os.fork() or time.sleep({MARK})",
        f"if os.fork() == 0:\n    os.setsid()\n    os.execlp('sleep', 'sleep', '{MARK}')",
        f"import subprocess\nsubprocess.Popen(['sleep', '{MARK}'], start_new_session=True)",
        f"os.posix_spawnp('sleep', ['sleep', '{MARK}'], {{}})",
        f"os.system('sleep {MARK} &') == 0 or exit(1)",
        "import multiprocessing\nmultiprocessing.Process(target=print).start()",
        f"os.execlp('sleep', 'sleep', '{MARK}')",
        "import ctypes\nctypes.CDLL(None).vfork() < 0 and exit(1)",
        "import ctypes\nctypes.CDLL(None, use_errno=True).syscall(435, 0, 0)\nctypes.get_errno() == 38 and exit(1)",
        "import socket\nsocket.socket()",
        "os.kill(os.getppid(), 0)",
    ],
    ids=[
        "forks", "daemon", "subprocess", "spawn", "system", "multiprocessing", "exec", "vfork", "clone3", "socket",
        "signal to the parent",
    ],
)  # fmt: skip
def test_programs_cannot_start_processes_nor_reach_others(attack: str):
    verdict = check_output(f"import os\nprint(4, flush=True)\n{attack}", [Case("", "4")], LIMITS)
    assert not verdict.passed
    assert "exit code 1" in verdict.reason


@linux_only
@pytest.mark.parametrize("kill", ["os.kill(int(input()), 9)", "os.killpg(int(input()), 9)"])
def test_a_program_cannot_kill_another_process(kill: str):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as victim:
        check_output(f"import os\n{kill}", [Case(f"{victim.pid}\n", "")], LIMITS)
        assert victim.poll() is None
        victim.communicate(b"\n")
    assert victim.returncode == 0


@linux_only
def test_memory_is_limited():
    source = "block = bytearray(600 << 20)\nprint(4)"
    assert check_output(source, [Case("", "4")], Limits(time_s=20, memory_mb=1024)).passed
    verdict = check_output(source, [Case("", "4")], Limits(time_s=20, memory_mb=512))
    assert verdict == (False, "case 1: exit code 1: MemoryError")
    verdict = check_output("x = []\nwhile True: x.append(bytearray(1 << 20))", [Case("", "")], LIMITS)
    assert verdict == (False, "case 1: exit code 1: MemoryError")


def test_files_are_limited():
    source = "open('big', 'wb').write(bytes(6 << 20))\nprint(4)"
    assert check_output(source, [Case("", "4")], Limits(time_s=20, file_mb=8)).passed
    assert "File too large" in check_output(source, [Case("", "4")], Limits(time_s=20, file_mb=4)).reason


@linux_only
def test_limits_cannot_be_raised():
    source = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))"
    assert "not allowed to raise" in check_output(source, [Case("", "")], LIMITS).reason
    source = (
        "print([line.split()[1].strip('0') for line in open('/proc/self/status') if line[:6] in ('CapEff', 'CapPrm')])"
    )
    assert check_output(source, [Case("", "['', '']")], LIMITS) == (True, "")


@pytest.mark.parametrize(
    "source",
    [
        "import os\nfor _ in range(1200):\n    os.mkdir('d')\n    os.chdir('d')",
        "import os\nos.mkdir('d')\nopen('d/f', 'w')\nos.chmod('d', 0)",
        "import os, shutil\nshutil.rmtree(os.getcwd())",
        "import os\nos.symlink(input(), 'link')",
    ],
    ids=["deep", "no permission", "removed by itself", "link out"],
)
def test_the_working_folder_is_removed_and_nothing_else(source: str, tmp_path: Path):
    kept = tmp_path / "kept" / "file"
    kept.parent.mkdir()
    kept.touch()
    assert check_output(source, [Case(f"{kept.parent}\n", "")], LIMITS).passed
    assert kept.exists()


# --- attacks on the verdict -------------------------------------------------------------------------------------------

TESTS = "assert sorted(largest([3, 1, 2], 2)) == [2, 3]\nassert largest([5], 1) == [5]"
RIGHT = "def largest(items, n):\n    return sorted(items)[-n:]"


def test_right_and_wrong_answers():
    assert check_assertions(RIGHT, TESTS, LIMITS) == (True, "")
    assert check_assertions(RIGHT.replace("-n", "n"), TESTS, LIMITS).passed is False
    assert check_assertions("", TESTS, LIMITS) == (False, "NameError: name 'largest' is not defined")
    assert check_assertions("def largest(:", TESTS, LIMITS).passed is False


@pytest.mark.parametrize(
    "forgery",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "def largest(items, n):\n    import sys\n    sys.exit(0)",
        "import os\ndef largest(items, n):\n    os._exit(0)",
        'print(\'{"verdict": "passed", "reason": ""}\')',
        "class Same(list):\n    def __eq__(self, other): return True\n    def __iter__(self): return iter([2, 3])\n"
        "def largest(items, n): return Same()",
        "class Same:\n    def __eq__(self, other): return True\n    def __bool__(self): return True\n"
        "    def __iter__(self): return iter([Same(), Same()])\n    def __lt__(self, other): return True\n"
        "def largest(items, n): return Same()",
        "import builtins\nbuiltins.sorted = lambda x: [2, 3]\nbuiltins.AssertionError = Exception\n"
        "def sorted(x): return [2, 3]\ndef largest(items, n): return [5]",
        "import os\nfor fd in range(64):\n    try:\n"
        '        os.write(fd, b\'{"verdict": "passed", "reason": ""}\\n\' * 9)\n    except OSError: pass\n'
        "def largest(items, n): return []",
        "import os\nfor fd in range(64):\n    try:\n        os.write(fd, b'{\"value\": true}\\n' * 9)\n"
        "    except OSError: pass\ndef largest(items, n): return []",
        "import sys\nfor module in list(sys.modules.values()): vars(module).clear()\ndef largest(items, n): return []",
        "raise SystemExit",
        "def largest(items, n): raise StopIteration",
        "def largest(items, n):\n    items.clear()\n    return items",
    ],
    ids=[
        "exit at import", "hard exit at import", "exit in the call", "hard exit in the call", "prints a verdict",
        "list that equals all", "object that equals all", "patched builtins", "verdicts into every descriptor",
        "replies into every descriptor", "cleared modules", "SystemExit", "StopIteration", "emptied input",
    ],
)  # fmt: skip
def test_a_verdict_cannot_be_forged(forgery: str):
    assert check_assertions(forgery, TESTS, LIMITS).passed is False


def test_tests_import_nothing_that_the_answer_wrote():
    forged = "open('statistics.py', 'w').write('def mean(x): return 2')\nimport statistics\n"
    tests = "import statistics\nassert statistics.mean(f()) == 2"
    assert check_assertions(f"{forged}assert statistics.mean([]) == 2\ndef f(): return [1, 3]", tests, LIMITS).passed
    assert check_assertions(f"{forged}def f(): return [1, 1]", tests, LIMITS) == (False, "AssertionError: ")


@pytest.mark.parametrize(
    "answer",
    ["def f(): import os; os._exit(0)", "def f(): raise SystemExit(0)", "def f(): import sys; sys.exit()"],
)
def test_an_answer_that_ends_is_not_the_exception_that_tests_expect(answer: str):
    tests = "try:\n    f()\nexcept Exception:\n    pass\nelse:\n    raise AssertionError"
    assert check_assertions(answer, tests, LIMITS) == (False, "_AnswerEnded: the answer's process ended")
    assert check_assertions("def f(): raise ValueError", tests, LIMITS).passed


@pytest.mark.parametrize(
    "answer",
    [f"import time\ntime.sleep({MARK})", f"def largest(items, n):\n    import time\n    time.sleep({MARK})"],
    ids=["at import", "in the call"],
)
def test_an_answer_that_hangs_fails(answer: str):
    assert check_assertions(answer, TESTS, SHORT) == (False, "ran longer than 1 s")


@linux_only
@pytest.mark.parametrize("start", [f"subprocess.Popen(['sleep', '{MARK}'])", "os.fork()", "os.kill(os.getppid(), 0)"])
def test_answers_in_calls_are_confined_too(start: str):
    source = f"import os, subprocess\ndef f():\n    {start}"
    tests = "try:\n    f()\nexcept PermissionError:\n    pass\nelse:\n    raise AssertionError"
    assert check_assertions(source, tests, LIMITS) == (True, "")


# --- what tests may do ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "tests"),
    [
        ("def f(x): return x, {'a': [.5, None]}, {3}, b'x', 2j",
         "assert f('s') == ('s', {'a': [.5, None]}, {3}, b'x', 2j)"),
        ("def f(n): return 7**n", "assert f(20000) == 7**20000"),
        ("def f(a, *b, c=1): return [a, b, c]", "assert f(1, 2, c=3) == [1, (2,), 3]"),
        ("def f(x): x.sort()", "x = [3, 1]\nassert f(x) is None and x == [1, 3]"),
        ("def f(d): d['k'] = d.pop('a')", "d = {'a': 1}\nf(d)\nassert d == {'k': 1}"),
        ("def f(n):\n    for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2] and sum(f(4)) == 6"),
        ("def f(x): raise KeyError(x)", "try:\n    f(1)\n    assert False\nexcept KeyError:\n    pass"),
        ("class E(ValueError): pass\ndef f(): raise E('why')",
         "try:\n    f()\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'why'"),
        (
            "class Stack:\n    def __init__(self): self.items = []\n"
            "    def push(self, x): self.items.append(x); return self\n"
            "    def __len__(self): return len(self.items)\n    def __getitem__(self, i): return self.items[i]\n"
            "    def __contains__(self, x): return x in self.items",
            "s = Stack().push(1).push((2, 3))\nassert len(s) == 2 and s[1] == (2, 3) and 1 in s and 5 not in s\n"
            "assert s.items == [1, (2, 3)]",
        ),
        ("from collections import *\nP = namedtuple('P', 'x y')\ndef f(): return Counter('aab'), P(1, 2)",
         "assert f() == ({'a': 2, 'b': 1}, (1, 2))"),
        ("def make(n):\n    def add(x): return x + n\n    return add\ndef apply(g, x): return g(x)",
         "add = make(2)\nassert add(3) == 5 and apply(add, 1) == 3"),
        ("def f(x): return x", "def check(candidate):\n    assert all(candidate(i) == i for i in range(3))\ncheck(f)"),
        ("import math\ndef f(): return math.pi", "import math\nassert math.isclose(f(), 3.14159, abs_tol=1e-4)"),
    ],
)  # fmt: skip
def test_tests_can_use_what_python_tests_use(source: str, tests: str):
    check_test_code(tests)
    assert check_assertions(source, tests, LIMITS) == (True, "")


def test_tests_that_cannot_be_run_are_told_from_answers_that_fail():
    verdict = check_assertions("def f(g): return g(1)", "assert f(lambda x: x) == 1", LIMITS)
    assert verdict.passed is None
    assert "must be plain data" in verdict.reason


@pytest.mark.parametrize("tests", ["assert f() == 1", "assert f()", "assert not f()", "assert f() != 2"])
def test_an_object_of_the_answer_decides_no_test(tests: str):
    source = "class A:\n    __eq__ = __ne__ = lambda s, o: True\n    __bool__ = lambda s: True\n\ndef f(): return A()"
    verdict = check_assertions(source, tests, LIMITS)
    assert verdict.passed is False
    assert "not plain data" in verdict.reason


def test_code_that_leaves_a_module_to_the_answer_is_refused():
    with pytest.raises(ValueError, match=r"must import the modules it uses, got math\.isclose without `import math`"):
        check_test_code("assert math.isclose(f(), 1.0)")
    with pytest.raises(ValueError, match="test_code must be Python"):
        check_test_code("assert f( == 1")
    check_test_code(
        "import os.path\nfrom math import isclose as queue\nassert os.path.join('a') and queue.real and string()"
    )
    check_test_code("def check(code):\n    assert code.value == 1")


_keys = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
_plain = st.recursive(
    _keys,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.sets(_keys)
        | st.frozensets(_keys)
        | st.dictionaries(_keys, inner)
    ),
    max_leaves=8,
)


def _typed(value: object) -> object:
    """Equality that tells 1 from True and 1.0, and a list from a tuple."""
    if isinstance(value, dict):
        return "dict", [(_typed(k), _typed(v)) for k, v in value.items()]
    if isinstance(value, (set, frozenset)):
        return type(value), {_typed(item) for item in value}
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_typed(item) for item in value)
    return type(value), value


@given(_plain)
def test_plain_values_cross_unchanged(value: object):
    def refuse(other: object) -> int:
        raise AssertionError(other)

    assert _typed(decode(encode(value, refuse), refuse)) == _typed(value)


# --- where the sandbox cannot work ------------------------------------------------------------------------------------


def test_systems_and_limits_that_cannot_work_are_refused(monkeypatch: pytest.MonkeyPatch):
    require_sandbox(LIMITS)
    with pytest.raises(
        RuntimeError, match=r"require_sandbox: a program that prints one word must pass .* Raise the limits"
    ):
        require_sandbox(Limits(time_s=0.001))
    monkeypatch.setattr(sandbox.os, "name", "nt")
    with pytest.raises(RuntimeError, match=r"require_sandbox: the system must be Linux or macOS, got .*POSIX"):
        require_sandbox(LIMITS)


@linux_only
def test_without_a_filter_processes_are_refused_by_number_and_root_is_turned_away(tmp_path: Path):
    program = f"""
import os, sys
sys.path.insert(0, {str(Path(sandbox.__file__).parent)!r})
from sandbox_child import confine
confine._MACHINES.clear()
try:
    confine.confine(parent=os.getppid(), cpu_seconds=20, memory_bytes=1 << 30, file_bytes=1 << 20)
    os.fork()
except OSError as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    expected = "root's processes cannot be limited" if os.geteuid() == 0 else "BlockingIOError"
    assert expected in done.stdout
    assert done.stdout.count("\n") == 1
