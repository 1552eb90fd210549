"""The table of C functions against forebay.h, and the objects over the library. Needs Python only."""

import ast
import pathlib
import re
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

import forebay
from forebay import _library, core

HEADER = ROOT / "runtime" / "api" / "include" / "forebay" / "forebay.h"


def functions_of(header):
    """{name: letters} of all FOREBAY_API functions, in the words of _library.FUNCTIONS."""
    text = re.sub(r"/\*.*?\*/", "", header.read_text(encoding="utf-8"), flags=re.S)
    found = {}
    for result, name, parameters in re.findall(r"FOREBAY_API\s+([\w\s*]+?)\s*\bforebay_(\w+)\((.*?)\);", text, re.S):
        # A function as a parameter becomes one word.
        parameters = re.sub(r"void\s*\(\*\s*(\w+)\)\s*\([^)]*\)", r"function \1", " ".join(parameters.split()))
        listed = [] if parameters == "void" else parameters.split(",")
        letters = "".join(letter_of(one.strip()) for one in listed)
        prefix = {"int32_t": "", "const char*": "s:", "void": "-:"}[result.strip()]
        found[name] = prefix + letters
    for name in ("abi",):  # Its result is a number and no code.
        found[name] = "i:"
    return found


def letter_of(parameter):
    kind, name = re.fullmatch(r"(.*?)\s*(\w+(?:\[\d+\])?)", parameter).groups()
    kind = kind.replace("const ", "").strip()
    stars = kind.count("*") + name.count("[")
    base = kind.rstrip("*").strip()
    if base == "function":
        return "f"
    if base == "char":
        return "p" if "[" in name else "s" if stars == 1 else "S"
    if base in ("int32_t", "uint32_t", "uint64_t", "double"):
        letter = {"int32_t": "i", "uint32_t": "l", "uint64_t": "u", "double": "d"}[base]
        return letter.upper() if stars else letter
    if base.startswith("forebay_") and base not in ("forebay_store_calls", "forebay_step_result"):
        return "h" if stars == 1 else "H"
    return "p" if stars == 1 else "P"


class TableOfFunctions(unittest.TestCase):
    def test_it_is_that_of_the_header(self):
        self.assertEqual(_library.FUNCTIONS, functions_of(HEADER))

    def test_codes_and_flags_are_those_of_the_header(self):
        text = HEADER.read_text(encoding="utf-8")
        numbers = {name: int(value) for name, value in re.findall(r"#define FOREBAY_(\w+) \(?(-?\d+)\b", text)}
        self.assertEqual(_library.ABI, numbers["ABI"])
        for name, kind in (("INVALID_ARGUMENT", forebay.InvalidArgument), ("OUT_OF_MEMORY", forebay.OutOfMemory),
                           ("UNSUPPORTED", forebay.Unsupported), ("UNAVAILABLE", forebay.Unavailable),
                           ("IO_ERROR", forebay.InputOutputError), ("TIMEOUT", forebay.Timeout),
                           ("PEER_LOST", forebay.PeerLost), ("CORRUPTION", forebay.Corruption),
                           ("INTERNAL", forebay.Internal)):
            self.assertEqual(numbers[name], kind.code, name)
        for name in ("PERSISTENT", "FIXED", "PAUSABLE", "BACKWARD_READS_NOTHING", "FROZEN", "REPLICATED", "OPTIONAL",
                     "ELEMENTWISE", "WHOLE_STEP"):
            self.assertEqual(numbers[name], getattr(core, name), name)
        self.assertEqual({"fp32": numbers["FP32"], "bf16": numbers["BF16"], "fp16": numbers["FP16"]}, core.DTYPES)

    def test_structures_have_the_fields_of_the_header(self):
        text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(encoding="utf-8"), flags=re.S)
        for name, mirror in (("step_result", core.StepResult), ("store_calls", core._StoreCalls)):
            body = re.search(r"typedef struct forebay_%s \{(.*?)\} " % name, text, re.S).group(1)
            fields = [re.search(r"\(\*(\w+)\)|(\w+)$", one.strip()) for one in body.split(";") if one.strip()]
            self.assertEqual([m.group(1) or m.group(2) for m in fields], [field for field, _ in mirror._fields_])


class Arguments(unittest.TestCase):
    def test_whole_numbers_reach_c_up_to_the_ends_of_their_types(self):
        call = _library._with_checked_arguments("name", lambda *numbers: numbers, "ilu")
        for ends, beyond in (((-2**31, 0, 0), -1), ((2**31 - 1, 2**32 - 1, 2**64 - 1), 1)):
            self.assertEqual(call(*ends), ends)
            for i in range(3):
                numbers = [*ends[:i], ends[i] + beyond, *ends[i + 1:]]
                with self.assertRaisesRegex(forebay.InvalidArgument, f"^forebay_name: {numbers[i]} was given"):
                    call(*numbers)


class Names(unittest.TestCase):
    def test_one_that_is_not_there_is_no_attribute(self):
        self.assertTrue(hasattr(forebay, "Engine"))
        with self.assertRaisesRegex(AttributeError, "module 'forebay' has no attribute 'engine'"):
            forebay.engine


class Syntax(unittest.TestCase):
    def test_it_is_that_of_python_3_9(self):
        for file in (ROOT / "python" / "forebay").rglob("*.py"):
            ast.parse(file.read_text(encoding="utf-8"), str(file), feature_version=(3, 9))


class Errors(unittest.TestCase):
    def test_they_are_also_the_errors_of_python(self):
        for kind, base in ((forebay.InvalidArgument, ValueError), (forebay.OutOfMemory, MemoryError),
                           (forebay.Timeout, TimeoutError), (forebay.PeerLost, ConnectionError),
                           (forebay.InputOutputError, OSError)):
            error = kind("a text")
            self.assertIsInstance(error, base)
            self.assertIsInstance(error, forebay.Error)
            self.assertIn("a text", str(error))

    def test_a_library_that_is_not_there_is_named(self):
        with self.assertRaisesRegex(forebay.Unavailable, "FOREBAY_LIBRARY"):
            load = _library.library.__wrapped__
            from unittest import mock
            with mock.patch.dict("os.environ", {"FOREBAY_LIBRARY": "/no/such/library.so"}):
                load()


if __name__ == "__main__":
    unittest.main()
