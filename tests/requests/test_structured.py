"""Structured output: answers fit by an independent checker, and every other option holds beside it."""

import json
import re
import sys

import jsonschema
import pydantic
import pytest
import torch

import lfm2_cb.requests.structured as structured_module
from lfm2_cb import ContinuousBatchingGenerator, Structured
from lfm2_cb.engine.constraints import Constraint, GrammarError
from lfm2_cb.engine.engine import Engine
from lfm2_cb.requests.options import UnsupportedOptionError
from lfm2_cb.requests.structured import GrammarCompiler, StructuredUnavailable

TEXT = "It was the best of all that she had said to him, and it was the best of all that"


def record(**properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SHORT = {"type": "string", "maxLength": 12}
SCHEMAS = [
    record(name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 99}),
    record(a={"type": "boolean"}, b={"type": "null"}, c={"const": [1, {"x": "y"}]}),
    record(color={"enum": ["red", "green", 3, None]}),
    record(inner=record(x={"type": "integer"}, y={"type": "number"})),
    {"type": "array", "items": {"type": "integer", "multipleOf": 3}, "minItems": 2, "maxItems": 4},
    {"type": "array", "items": SHORT, "maxItems": 2},
    {"type": "array", "prefixItems": [{"type": "boolean"}, SHORT], "items": False, "minItems": 2},
    {"type": "integer", "exclusiveMinimum": -7, "exclusiveMaximum": 1000},
    {"type": "number", "minimum": 0.25, "maximum": 0.75},
    {"type": "string", "pattern": "^[A-Z][a-z]{1,8}( [A-Z][a-z]{1,8})?$"},
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "format": "date"},
    {"anyOf": [{"type": "integer"}, record(q={"type": "boolean"})]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    {"type": ["boolean", "null"]},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["b"]},
    {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "boolean"}}, "additionalProperties": False},
    {
        "$defs": {"node": record(v={"type": "integer"}, next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]})},
        "$ref": "#/$defs/node",
    },
    {},
]
REGEXES = [r"[0-9]{3}-[a-z]{2}", r"(yes|no)( maybe)*", r"\d+(\.\d+)?", r"[A-Z]\w{2,9}[.!?]", r"(a|bb)*c"]
LARK = 'start: sum\nsum: term ("+" term)*\nterm: NUMBER | "(" sum ")"\nNUMBER: /[0-9]{1,3}/'
GBNF = 'root ::= "[" item ("," item)* "]"\nitem ::= [a-z]+ | root'


def is_sum(text):
    return re.fullmatch(r"[0-9+()]+", text) is not None and isinstance(eval(re.sub(r"\b0+(?=\d)", "", text)), int)


def is_list(text):
    return isinstance(json.loads(re.sub(r"[a-z]+", "0", text)), list)


def fits(schema):
    return lambda text: jsonschema.validate(json.loads(text), schema) is None


#: each way to say what an answer looks like, and its checker
SHAPES = [
    *((schema, fits(schema)) for schema in SCHEMAS),
    (Structured.json_schema(SCHEMAS[0], whitespace="any"), fits(SCHEMAS[0])),
    (Structured.json_schema(SCHEMAS[3], whitespace="compact"), fits(SCHEMAS[3])),
    *((Structured.regex(pattern), re.compile(pattern).fullmatch) for pattern in REGEXES),
    (Structured.grammar(LARK), is_sum),
    (Structured.grammar(GBNF), is_list),
    (Structured.choice(["yes", 'n"o\n', "\\d", "perhaps"]), ["yes", 'n"o\n', "\\d", "perhaps"].__contains__),
]


@pytest.fixture(scope="module")
def generator(demo_stock, demo_tokenizer):
    with ContinuousBatchingGenerator(demo_stock, demo_tokenizer, cache_memory="8MiB", max_sequences=32) as generator:
        yield generator


def begins_something_that_fits(generator, shape, token_ids):
    start = GrammarCompiler(generator.model.config.vocab_size).compile(Structured.read(shape), generator.tokenizer)
    return start.start.deep_copy().consume_tokens(token_ids)


def check(generator, outputs, shapes):
    """Every answer is valid, or the beginning of something valid. Returns: how many are valid."""
    for output, (shape, is_valid) in zip(outputs, shapes, strict=True):
        assert output.finish_reason in ("stop", "length"), output
        if output.finish_reason == "stop":
            assert is_valid(output.text) is not False and is_valid(output.text) != [], (shape, output.text)
        else:
            assert begins_something_that_fits(generator, shape, output.token_ids), (shape, output.text)
    return sum(output.finish_reason == "stop" for output in outputs)


def test_every_answer_fits(generator):
    shapes = SHAPES * 8
    options = {"do_sample": True, "temperature": 1.0, "seed": 1, "max_new_tokens": 40}
    prompts = [f"{TEXT} {i % 8}" for i in range(len(shapes))]
    outputs = generator.generate(prompts, structured=[shape for shape, _ in shapes], **options)
    assert check(generator, outputs, shapes) > len(shapes) / 2
    assert len({output.text for output in outputs}) > len(shapes) / 2


OPTIONS = {
    "greedy": {"do_sample": False},
    "top-k": {"do_sample": True, "top_k": 5, "temperature": 2.0},
    "top-p": {"do_sample": True, "top_p": 0.8},
    "penalty": {"do_sample": True, "repetition_penalty": 1.5},
    "slow processor": {"do_sample": True, "epsilon_cutoff": 3e-4, "typical_p": 0.9},
    "a processor that undoes it": {
        "do_sample": False,  # else what it has raised leaves nothing of the rest within top_p
        "logits_processor": [lambda _, scores: scores.nan_to_num(neginf=100.0)],
    },
    "lookup": {"do_sample": True, "prompt_lookup_num_tokens": 4},
    "other eos": {"do_sample": True, "eos_token_id": [7, 2]},
    "no eos": {"do_sample": True, "eos_token_id": None},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_answers_fit_beside_other_options(generator, name):
    options = {"seed": 2, "max_new_tokens": 30, **OPTIONS[name]}
    shapes = [SHAPES[i] for i in (0, 2, 7, 22, 23, 27)]
    outputs = generator.generate([TEXT] * 6, structured=[shape for shape, _ in shapes], **options)
    assert check(generator, outputs, shapes)


def test_each_returned_sequence_fits_with_its_logprobs(generator):
    options = {"do_sample": True, "seed": 4, "num_return_sequences": 4, "max_new_tokens": 40, "logprobs": 2}
    outputs = generator.generate([TEXT, TEXT + "x"], structured=SCHEMAS[0], **options)
    assert check(generator, outputs, [SHAPES[0]] * 8) and len({output.text for output in outputs}) > 4
    for output in outputs:  # of the model's own distribution: what it wanted most is rarely what it may say
        assert [entry.token_id for entry in output.logprobs] == output.token_ids
        assert any(entry.top[0][0] != entry.token_id for entry in output.logprobs)


def test_answers_do_not_depend_on_batch_mates(generator):
    options = {"do_sample": True, "seed": 3, "max_new_tokens": 24}
    for extra in ({}, {"top_k": 20}, {"do_sample": False}):
        free = generator.generate([TEXT], **options | extra)[0]
        asked = [None, SCHEMAS[0], None, SCHEMAS[4]]
        together = generator.generate([TEXT] * 4, structured=asked, **options | extra)
        assert together[0].token_ids == free.token_ids
        alone = generator.generate([TEXT] * 2, structured=[None, SCHEMAS[0]], **options | extra)
        assert together[1].token_ids == alone[1].token_ids != together[0].token_ids


def test_without_native_kernels_the_answers_are_the_same(demo_stock, demo_tokenizer, generator):
    shapes = [shape for shape, _ in SHAPES[:8]]
    with ContinuousBatchingGenerator(demo_stock, demo_tokenizer, cache_memory="8MiB", kernels="torch") as by_torch:
        for options in ({"do_sample": False}, {"do_sample": True, "seed": 5}):
            said = [
                g.generate([TEXT] * 8, structured=shapes, max_new_tokens=16, **options) for g in (generator, by_torch)
            ]
            assert [o.token_ids for o in said[0]] == [o.token_ids for o in said[1]]


def test_drafts_change_nothing(generator, monkeypatch):
    monkeypatch.setattr(Constraint, "forced", lambda *_: [])  # all are guesses
    options = {"do_sample": True, "seed": 6, "max_new_tokens": 40, "structured": SCHEMAS[18]}
    prompts = [json.dumps({"v": 1, "next": {"v": 1, "next": {"v": 1, "next": None}}}) * 2] * 3
    plain = [output.token_ids for output in generator.generate(prompts, **options)]
    before = generator.engine.speculation.num_accepted
    assert [o.token_ids for o in generator.generate(prompts, prompt_lookup_num_tokens=6, **options)] == plain
    assert generator.engine.speculation.num_accepted > before
    model = generator.model
    assert [o.token_ids for o in generator.generate(prompts, assistant_model=model, **options)] == plain


def test_forced_tokens_are_verified_together(generator, monkeypatch):
    schema = record(**{f"a property with a long name {i}": {"type": "boolean"} for i in range(4)})
    options = {"do_sample": True, "seed": 9, "max_new_tokens": 90, "structured": schema}

    def answers(**more):
        steps, step = [], generator.engine.step
        with monkeypatch.context() as patch:
            patch.setattr(generator.engine, "step", lambda: (steps.append(1), step())[1])
            outputs = generator.generate([TEXT] * 3, **options, **more)
        return [output.token_ids for output in outputs], len(steps)

    fast, num_fast = answers()
    guessing, num_guessing = answers(prompt_lookup_num_tokens=5)
    monkeypatch.setattr(Constraint, "forced", lambda *_: [])
    slow, num_slow = answers()
    assert fast == guessing == slow and num_slow == max(map(len, slow))
    assert num_guessing <= num_fast < num_slow / 3


def test_preempted_requests_go_on_where_they_were(demo_stock, demo_tokenizer, generator):
    shapes = [SHAPES[i] for i in (0, 3, 5, 18, 4, 19)]
    options = {"do_sample": True, "seed": 7, "max_new_tokens": 48, "structured": [shape for shape, _ in shapes]}
    plain = generator.generate([TEXT] * 6, **options)
    with ContinuousBatchingGenerator(
        demo_stock, demo_tokenizer, cache_memory="300KB", block_size=4, max_sequences=6
    ) as small:
        outputs = small.generate([TEXT] * 6, **options)
    assert sum(output.metrics.num_preemptions for output in outputs)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    assert check(generator, outputs, shapes)


def test_the_end_is_where_the_grammar_may_end(generator):
    def answer(pattern, **options):
        return generator.generate([TEXT], structured=Structured.regex(pattern), do_sample=False, **options)[0]

    eos = generator.model.generation_config.eos_token_id
    ended = answer("[a-c]{2}", max_new_tokens=9)
    assert ended.finish_reason == "stop" and ended.token_ids[-1] in eos and len(ended.text) == 2
    silent = answer("[a-c]{2}", max_new_tokens=9, eos_token_id=None)  # there is no token to say so
    assert silent.finish_reason == "stop" and silent.token_ids == ended.token_ids[:-1]
    cut = answer("[a-c]{50}", max_new_tokens=9)
    assert cut.finish_reason == "length" and re.fullmatch("[a-c]+", cut.text)
    stopped = answer("[a-c]{50}", max_new_tokens=30, stop_strings=["aa", "bb", "cc"])
    assert stopped.finish_reason in ("stop", "length") and re.fullmatch("[a-c]+", stopped.text)


def test_what_cannot_go_on_ends_alone(generator):
    options = {"max_new_tokens": 12, "do_sample": False, "min_new_tokens": 9}
    outputs = generator.generate([TEXT] * 2, structured=[Structured.choice(["ab"]), None], **options)
    assert outputs[0].finish_reason == "error" and "grammar" in str(outputs[0].error)
    assert outputs[1].finish_reason == "length"
    assert outputs[1].token_ids == generator.generate([TEXT], **options)[0].token_ids


class Friend(pydantic.BaseModel):
    properties: int


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    tags: list[bool] = pydantic.Field(max_length=2)
    friend: Friend | None


def test_pydantic(generator):
    options = {"do_sample": True, "seed": 8, "max_new_tokens": 60}
    outputs = generator.generate([TEXT] * 8, structured=Person, **options)
    people = [Person.model_validate_json(output.text) for output in outputs]
    assert len({person.name for person in people}) > 1 and '"tags": [' in outputs[0].text
    assert all(json.loads(output.text).keys() == {"name", "tags", "friend"} for output in outputs)


REFUSED = {
    "not": {"not": {"type": "string"}},
    "uniqueItems": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "strin": {"type": "strin"},
    "look-around": {"type": "string", "pattern": "a(?=b)"},
    "Unsatisfiable": {"type": "integer", "minimum": 5, "maximum": 4},
    "look-around, ": Structured.regex("(?=a)b"),
    "unclosed": Structured.regex("(a"),
    "unknown name": Structured.grammar("start: x"),
    "cannot be": Structured.grammar('root ::= ("a"'),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_enforced_is_refused_with_the_reason(generator, reason, monkeypatch):
    monkeypatch.setattr(Engine, "add_all", lambda *_: pytest.fail("it runs"))
    for value in (REFUSED[reason], [None, REFUSED[reason]]):
        with pytest.raises(GrammarError, match=reason):
            generator.generate([TEXT] * 2, structured=value)


def test_what_is_no_shape_is_refused(generator, demo_stock):
    for value in ("[0-9]+", 5, [["a"]], [SCHEMAS[0], 5], object()):
        with pytest.raises(TypeError, match="structured must be"):
            generator.generate([TEXT] * 2, structured=value)
    with pytest.raises(ValueError, match="structured has 1 entries for 2 prompts"):
        generator.generate([TEXT] * 2, structured=[SCHEMAS[0]])
    for make in (
        lambda: Structured.choice("ab"),
        lambda: Structured.choice([]),
        lambda: Structured.choice(["a", ""]),
        lambda: Structured.regex(""),
        lambda: Structured.regex(5),
        lambda: Structured.json_schema("{}"),
        lambda: Structured.json_schema({"const": object()}),
        lambda: Structured.json_schema({}, whitespace="none"),
    ):
        with pytest.raises((TypeError, ValueError)):
            make()
    with pytest.raises(UnsupportedOptionError, match="structured"):
        generator.generate([TEXT], structured=SCHEMAS[0], num_beams=2)
    with (
        ContinuousBatchingGenerator(demo_stock, cache_memory="8MiB") as wordless,
        pytest.raises(ValueError, match="structured needs a tokenizer"),
    ):
        wordless.generate([[5]], structured=SCHEMAS[0])


def test_without_the_extra_one_error_names_it(demo_stock, demo_tokenizer, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "llguidance"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with ContinuousBatchingGenerator(demo_stock, demo_tokenizer, cache_memory="8MiB") as generator:
        with pytest.raises(StructuredUnavailable, match=r"pip install 'lfm2-cb\[structured\]'"):
            generator.generate([TEXT], structured=SCHEMAS[0])
        assert generator.generate([TEXT], max_new_tokens=2)[0].finish_reason == "length"


def test_grammars_are_compiled_once_and_not_kept_for_ever(generator, monkeypatch):
    compiled, compile_one = [], structured_module._compile
    monkeypatch.setattr(
        structured_module, "_compile", lambda *given: (compiled.append(given[0]), compile_one(*given))[1]
    )
    monkeypatch.setattr(structured_module, "MAX_GRAMMARS", 3)
    compiler = GrammarCompiler(generator.model.config.vocab_size)
    shapes = [Structured.regex(f"{i}x") for i in range(3)]
    for _ in range(3):
        compiler.compile_all([*shapes, None], generator.tokenizer)
    assert compiled == shapes
    for shape in (shapes[0], Structured.regex("y"), shapes[0], shapes[1]):  # the second was the first to go
        compiler.compile(shape, generator.tokenizer)
    assert compiled == [*shapes, Structured.regex("y"), shapes[1]]


def test_scores_are_those_chosen_from(generator):
    options = {"max_new_tokens": 6, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    output = generator.generate([TEXT], structured=Structured.regex("[ab]{9}"), do_sample=False, **options)[0]
    allowed = output.scores > -torch.inf
    assert allowed.any(1).all() and (allowed.sum(1) < 20).all() and output.logits.isfinite().all()
    assert torch.equal(output.scores[allowed], output.logits[allowed])
