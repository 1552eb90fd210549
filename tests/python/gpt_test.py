"""forebay-gpt with models of transformers: the same logits, and every tensor back bit for bit. And its tokenizer
beside that of tokenizers: the same tokens.

Small models with random weights, which the test writes; nothing is fetched.
"""

import json
import os
import pathlib
import subprocess
import tempfile
import unicodedata
import unittest
import warnings

import support

support.need("torch", "transformers", "safetensors", "tokenizers")
PROGRAM = os.environ.get("FOREBAY_GPT")
if not PROGRAM:
    support.skip("FOREBAY_GPT does not name the program")

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy
import tokenizers
import torch
import transformers
from safetensors.torch import load_file

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
warnings.simplefilter("ignore")

SEQUENCE = 24


def gpt2(vocabulary=300):
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=vocabulary, n_positions=40, n_embd=48, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0))


def llama(vocabulary=300, **options):
    settings = dict(vocab_size=vocabulary, max_position_embeddings=40, hidden_size=48, num_hidden_layers=3,
                    num_attention_heads=4, num_key_value_heads=2, intermediate_size=72, rms_norm_eps=1e-6,
                    rope_theta=1000.0, bos_token_id=0, eos_token_id=0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(settings | options)))


MODELS = {"gpt2": gpt2, "llama": llama,
          "llama, tied": lambda: llama(tie_word_embeddings=True, num_key_value_heads=4)}


def tensors(directory):
    found = {}
    for file in sorted(pathlib.Path(directory).glob("*.safetensors")):
        found.update(load_file(file))
    return found


class Models(unittest.TestCase):
    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.place = pathlib.Path(place.name)
        generator = numpy.random.default_rng(7)
        self.tokens = generator.integers(0, 300, SEQUENCE + 1).astype(numpy.uint16)
        self.tokens.tofile(self.place / "tokens.bin")

    def run_program(self, *words, steps=0):
        done = subprocess.run([PROGRAM, "--quiet", "--steps", str(steps), "--sequence", str(SEQUENCE), "--batch", "2",
                               "--threads", "1", *words],
                              capture_output=True, text=True, timeout=300, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)

    def with_text(self):
        file = str(self.place / "tokens.bin")
        return ["--data", file, "--evaluation-data", file]

    def saved(self, name, dtype=torch.float32, **options):
        """A model with weights large enough to tell wrong arithmetic from rounding."""
        torch.manual_seed(11)
        model = MODELS[name]().to(dtype).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(self.place / "in", **options)
        return model

    def logits(self, model):
        with torch.no_grad():
            return model(torch.tensor(self.tokens[:SEQUENCE].astype("int64"))[None]).logits[0]

    def test_logits_agree_and_tensors_come_back(self):
        for name in MODELS:
            for options in ([], ["--ranks", "2", "--stage", "3"], ["--ranks", "2", "--tensor-parallel", "2"],
                            ["--ranks", "2", "--pipeline-parallel", "2", "--micro-steps", "2"]):
                with self.subTest(name=name, options=options), tempfile.TemporaryDirectory() as out:
                    model = self.saved(name)
                    self.run_program("--initial", str(self.place / "in"), "--export", f"{out}/model/", "--logits",
                                     f"{out}/logits", *self.with_text(), *options)

                    expected = self.logits(model)
                    found = load_file(f"{out}/logits")["logits"]
                    self.assertEqual(found.shape, expected.shape)
                    self.assertLess((found - expected).abs().max().item(), 1e-4)
                    self.assertGreater(expected.abs().max().item(), 0.5)
                    before, after = tensors(self.place / "in"), tensors(f"{out}/model")
                    self.assertEqual(before.keys(), after.keys())
                    for key, value in before.items():
                        self.assertEqual(value.dtype, after[key].dtype)
                        self.assertTrue(torch.equal(value, after[key]), key)
                    again = transformers.AutoModelForCausalLM.from_pretrained(f"{out}/model")
                    self.assertIs(type(again), type(model))
                    self.assertTrue(torch.equal(self.logits(again.eval()), expected))

    def test_the_base_of_rotary_embeddings_is_taken(self):
        """transformers 5 writes it in rope_parameters, version 4 as rope_theta."""
        model = self.saved("llama")
        file = self.place / "in/config.json"
        config = json.loads(file.read_text())
        config.pop("rope_parameters", None)
        config["rope_theta"] = 1000.0
        file.write_text(json.dumps(config))
        self.run_program("--initial", str(self.place / "in"), "--logits", str(self.place / "logits"), *self.with_text())
        found = load_file(self.place / "logits")["logits"]
        self.assertLess((found - self.logits(model)).abs().max().item(), 1e-4)

    def test_shards_are_read_and_written(self):
        for name in MODELS:
            with self.subTest(name=name), tempfile.TemporaryDirectory() as out:
                model = self.saved(name, max_shard_size="150KB")
                self.assertTrue((self.place / "in/model.safetensors.index.json").exists())
                self.run_program("--initial", str(self.place / "in"), "--export", out, "--export-shard", "100KB",
                                 *self.with_text())
                index = json.loads(pathlib.Path(out, "model.safetensors.index.json").read_text())
                self.assertGreater(len(set(index["weight_map"].values())), 2)
                again = transformers.AutoModelForCausalLM.from_pretrained(out)
                for key, value in model.state_dict().items():
                    self.assertTrue(torch.equal(value, again.state_dict()[key]), key)
                for file in (self.place / "in").iterdir():
                    file.unlink()

    def test_half_precision_is_widened_exactly(self):
        for name in MODELS:
            with self.subTest(name=name), tempfile.TemporaryDirectory() as out:
                model = self.saved(name, torch.bfloat16)
                self.run_program("--initial", str(self.place / "in"), "--export", f"{out}/", *self.with_text())
                after = tensors(out)
                for key, value in tensors(self.place / "in").items():
                    self.assertTrue(torch.equal(value.float(), after[key]), key)
                self.assertEqual(model.dtype, torch.bfloat16)

    def test_a_model_trains_further(self):
        for name in MODELS:
            with self.subTest(name=name), tempfile.TemporaryDirectory() as out:
                model = self.saved(name)
                generator = numpy.random.default_rng(8)
                generator.integers(0, 300, 500).astype(numpy.uint16).tofile(self.place / "text.bin")
                self.run_program("--initial", str(self.place / "in"), "--export", f"{out}/", "--data",
                                 str(self.place / "text.bin"), "--ranks", "2", "--stage", "2", steps=3)
                again = transformers.AutoModelForCausalLM.from_pretrained(out)
                self.assertFalse(torch.equal(self.logits(again.eval()), self.logits(model)))

    def test_settings_that_it_lacks_are_refused(self):
        for name, key, value in (("gpt2", "activation_function", "relu"), ("gpt2", "model_type", "bert"),
                                 ("gpt2", "n_inner", -1), ("gpt2", "n_layer", -1), ("llama", "hidden_act", "gelu"),
                                 ("llama", "attention_bias", True), ("llama", "head_dim", 8),
                                 ("llama", "rope_parameters", {"rope_type": "linear", "factor": 2}),
                                 ("llama", "rms_norm_eps", 0)):
            with self.subTest(name=name, key=key):
                self.saved(name)
                file = self.place / "in/config.json"
                config = json.loads(file.read_text())
                config[key] = value
                file.write_text(json.dumps(config))
                done = subprocess.run([PROGRAM, "--initial", str(self.place / "in"), "--steps", "0"],
                                      capture_output=True, text=True, check=False)
                self.assertEqual(done.returncode, 2)
                self.assertIn(key, done.stderr)


def kinds_of_text():
    """Text in which every rule of the pattern has its turn, by a fixed seed."""
    generator = numpy.random.default_rng(3)
    words = ["the", "basin", "I'll", "we've", "it's", "don't", "DON'T", "x1y2", "3.14", "naïve", "Straße", "日本語", "αβγ",
             "½", "٣٤", "१२", "Ⅷ", "²", "🙂", "👩\u200d👩", "e\u0301", "'", "''s", "--", "...", "_", "a_b", "#include", "<|x|>"]
    spaces = [" ", "  ", "   ", "\n", "\n\n", "\t", " \n ", "\r\n", "\u00a0", "\u3000", "\u2003 ", "\x0b", "\x85", "\x1c", ""]
    mixed = "".join(words[generator.integers(len(words))] + spaces[generator.integers(len(spaces))] for _ in range(4000))
    # Characters of an old Unicode, on which newer ones agree.
    category = unicodedata.ucd_3_2_0.category
    codes = [code for code in range(1, 0x30000) if category(chr(code)) not in ("Cs", "Cn", "Co")]
    drawn = "".join(chr(codes[i]) for i in generator.integers(0, len(codes), 6000))
    ends = ["", "a", " ", "  ", "a ", "a  ", " a", "'", "'s", " 's", "\n", "a\n"]
    return {"mixed": mixed, "drawn": drawn, **{f"end {i}": "x" + end for i, end in enumerate(ends)}}


class Tokens(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        place = tempfile.TemporaryDirectory()
        cls.addClassCleanup(place.cleanup)
        cls.place = pathlib.Path(place.name)
        cls.tokenizer = tokenizers.ByteLevelBPETokenizer()
        cls.tokenizer.train_from_iterator([kinds_of_text()["mixed"]], vocab_size=600, min_frequency=2,
                                          show_progress=False)
        (cls.place / "pair").mkdir()
        cls.tokenizer.save_model(str(cls.place / "pair"))
        cls.tokenizer.save(str(cls.place / "tokenizer.json"))

    def tokens(self, file, text):
        (self.place / "text").write_bytes(text.encode())
        (self.place / "tokens").unlink(missing_ok=True)
        done = subprocess.run([PROGRAM, "--quiet", "--steps", "0", "--sequence", "1", "--threads", "1", "--layers", "1",
                               "--hidden", "8", "--heads", "1", "--text", str(self.place / "text"), "--tokenizer", "bpe", str(file),
                               "--write-tokens", str(self.place / "tokens")],
                              capture_output=True, text=True, timeout=300, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        return numpy.fromfile(self.place / "tokens", numpy.uint16).tolist()

    def test_they_are_those_of_tokenizers(self):
        for file in ("tokenizer.json", "pair", "pair/vocab.json"):
            for name, text in kinds_of_text().items():
                if file != "tokenizer.json" and name != "mixed":
                    continue
                text += " and more"  # A sample needs two tokens.
                with self.subTest(file=file, text=name):
                    expected = self.tokenizer.encode(text)
                    found = self.tokens(self.place / file, text)
                    different = [i for i, (one, other) in enumerate(zip(found, expected.ids)) if one != other]
                    self.assertEqual(different[:1], [])
                    self.assertEqual(len(found), len(expected.ids))

    def test_added_tokens_are_found_in_the_text(self):
        tokenizer = tokenizers.Tokenizer.from_file(str(self.place / "tokenizer.json"))
        tokenizer.add_special_tokens(["<|endoftext|>", "<|end|>"])
        tokenizer.save(str(self.place / "added.json"))
        text = "the basin<|endoftext|>the<|end|><|end|> basin <|endof"
        self.assertEqual(self.tokens(self.place / "added.json", text), tokenizer.encode(text).ids)

    def test_generated_text_is_made_of_tokens(self):
        out = self.place / "report"
        (self.place / "text").write_text("the basin of the basin " * 50)
        done = subprocess.run([PROGRAM, "--quiet", "--steps", "2", "--threads", "1", "--text", str(self.place / "text"),
                               "--tokenizer", "bpe", str(self.place / "pair"), "--generate", "5", "--temperature", "0",
                               "--prompt", "the basin", "--report", str(out), "--ranks", "2", "--stage", "3"],
                              capture_output=True, timeout=300, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(done.stdout.startswith(b"the basin"))

    def test_other_tokenizers_are_refused(self):
        known = json.loads((self.place / "tokenizer.json").read_text())
        for key, change in (("pre_tokenizer", {"pre_tokenizer": {"type": "Whitespace"}}),
                            ("add_prefix_space", {"pre_tokenizer": known["pre_tokenizer"] | {"add_prefix_space": True}}),
                            ("type", {"model": known["model"] | {"type": "Unigram"}}),
                            ("ignore_merges", {"model": known["model"] | {"ignore_merges": True}}),
                            ("normalizer", {"normalizer": {"type": "NFC"}})):
            with self.subTest(key=key):
                file = self.place / "other.json"
                file.write_text(json.dumps(known | change))
                done = subprocess.run([PROGRAM, "--steps", "0", "--tokenizer", "bpe", str(file)], capture_output=True,
                                      text=True, check=False)
                self.assertEqual(done.returncode, 2)
                self.assertIn(key, done.stderr)


if __name__ == "__main__":
    support.main()
