"""Every stage, offload and kind of activation checkpointing in guarded memory, on one, two and three ranks.

There is one digest for each dtype and number of ranks, and the losses and norms in fp32 are those of torch by the
contract's arithmetic: equal on one rank, to 1e-6 on several. It takes minutes; ./dev test-pytorch table runs it.
"""

import os
import tempfile
import unittest

import support

support.need("torch", "numpy")
support.need_library()

import bits_test
import ranks


class Table(unittest.TestCase):
    def check(self, world):
        expected = bits_test.plain(world)
        for dtype in ("fp32", "bf16"):
            with tempfile.TemporaryDirectory() as files:
                case = {"dtype": dtype, "files": files}
                results = ([ranks.table(**case)] if world == 1 else
                           support.torchrun(ranks.__file__, world, {"kind": "table", **case}, timeout=1500))
            self.assertEqual(len(results), world)
            digests = {digest for one in results for digest in one["digests"].values()}
            self.assertEqual(len(digests), 1, results)
            print(f"{world} ranks, {dtype}: {len(results[0]['digests'])} cases, {digests}", flush=True)
            for one in results if dtype == "fp32" else ():
                if world == 1:
                    self.assertEqual(one["seen"], expected[0])
                for a, b in zip(one["seen"], expected[one["rank"]]):
                    self.assertLessEqual(abs(a - b), 1e-6 * abs(b))

    def test_one_rank(self):
        self.check(1)

    def test_two_ranks(self):
        self.check(2)

    def test_three_ranks(self):
        self.check(3)


if __name__ == "__main__":
    support.main()
