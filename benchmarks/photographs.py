"""A projector alone, trained on drawn shapes and photographs with captions, on a CPU: does it learn to see?

    python -m benchmarks.photographs --folder /tmp/photographs > benchmarks/results/photographs.json

The model is LLaVA in small (half a million parameters, random). A first run trains its language model on text: it
writes a caption from the words of the caption in any order. A second run trains the projector alone, tower and language
model frozen, so that images take the place of these words. Photographs are those that scikit-image and scikit-learn
ship, cut into crops; the held-out crops are others of the same photographs, the held-out shapes stand elsewhere.
Measured are the held-out loss before and after, with each caption's own image and with another one's, captions that
transformers writes from the saved folder, and whether frozen weights are the same bits. Without the two packages:
shapes alone, and a line that says so.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image, ImageDraw

SIDE, PATCH = 56, 14  # pixels
QUESTION = "what is this"
SHAPES = ("circle", "square", "triangle")
COLORS = {"red": "#d02020", "green": "#208040", "blue": "#2040d0", "yellow": "#e0c010"}
GROUNDS = {"white": "#f8f8f8", "black": "#101010"}
SIZES = {"small": 16, "large": 36}
PHOTOGRAPHS = {
    "astronaut": "an astronaut", "chelsea": "a cat", "coffee": "a cup of coffee", "rocket": "a rocket",
    "grass": "a field of grass", "gravel": "a road of gravel", "coins": "a table of coins", "moon": "the moon",
    "china.jpg": "a temple", "flower.jpg": "a flower",
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% if message['content'] is string %} {{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %} <image>{% else %} {{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %} <end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ("<pad>", "<unk>", "<user>", "<assistant>", "<end>", "<image>")


def draw_shape(draw: random.Random) -> tuple[Image.Image, str]:
    """A shape somewhere on a plain ground, and its caption."""
    size, color, shape, ground = (draw.choice(list(kinds)) for kinds in (SIZES, COLORS, SHAPES, GROUNDS))
    image, side = Image.new("RGB", (SIDE, SIDE), GROUNDS[ground]), SIZES[size]
    x, y = (draw.randint(1, SIDE - side - 1) for _ in range(2))
    box, pen = (x, y, x + side, y + side), ImageDraw.Draw(image)
    if shape == "circle":
        pen.ellipse(box, fill=COLORS[color])
    elif shape == "square":
        pen.rectangle(box, fill=COLORS[color])
    else:
        pen.polygon([(x, y + side), (x + side, y + side), (x + side // 2, y)], fill=COLORS[color])
    return image, f"a {size} {color} {shape} on {ground}"


def open_photographs() -> dict[str, Image.Image]:
    """Photographs by their captions; {} where the packages that ship them are not installed."""
    try:
        from skimage import data
        from sklearn.datasets import load_sample_image
    except ModuleNotFoundError as error:
        print(f"no photographs: {error} (pip install scikit-image scikit-learn)", file=sys.stderr)
        return {}
    return {
        f"a photograph of {caption}": Image.fromarray(
            np.asarray(load_sample_image(name) if name.endswith(".jpg") else getattr(data, name)())
        ).convert("RGB")
        for name, caption in PHOTOGRAPHS.items()
    }


def cut_crop(photograph: Image.Image, draw: random.Random) -> Image.Image:
    """A square of half to nine tenths of the shorter side, somewhere."""
    side = int(min(photograph.size) * draw.uniform(0.5, 0.9))
    x, y = (draw.randint(0, length - side) for length in photograph.size)
    return photograph.crop((x, y, x + side, y + side)).resize((4 * SIDE, 4 * SIDE))


def write_rows(folder: Path, name: str, pairs: list[tuple[Image.Image, str]]) -> None:
    """``name.jsonl`` with an image for each caption, and ``name-exchanged.jsonl`` with the image of another caption."""
    for number, (image, _) in enumerate(pairs):
        image.save(folder / f"{name}-{number}.png")
    for exchanged in (False, True):
        rows = []
        for number, (_, caption) in enumerate(pairs):
            turn = next(n for n in range(1, len(pairs)) if pairs[(number + n) % len(pairs)][1] != caption)
            source = (number + turn) % len(pairs) if exchanged else number
            parts = [{"type": "image", "image": f"{name}-{source}.png"}, {"type": "text", "text": QUESTION}]
            rows.append({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": caption}]})
        path = folder / f"{name}{'-exchanged' * exchanged}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_texts(folder: Path, captions: list[str], draw: random.Random) -> None:
    """Rows of text that ask for a caption by its words, in any order, as many as an image has tokens."""
    rows = []
    for _ in range(1280):
        caption = draw.choice(captions)
        words = caption.split()
        asked = [draw.choice(words) for _ in range(8)] + words
        draw.shuffle(asked)
        rows.append({"prompt": " ".join(asked) + " " + QUESTION, "completion": caption})
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_model(folder: Path, words: set[str]) -> None:
    """LLaVA with a tower of 2 blocks and a language model of 3, random; a tokenizer of whole words."""
    import torch
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        PreTrainedTokenizerFast,
    )

    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *sorted(words)])}
    own = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own.add_special_tokens([AddedToken(token, special=True, lstrip=True, rstrip=True) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<end>", pad_token="<pad>", unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_special_tokens({"extra_special_tokens": ["<image>"]}, replace_extra_special_tokens=False)
    tokenizer.save_pretrained(folder)
    text = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, eos_token_id=vocabulary["<end>"], pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, image_size=SIDE,
        patch_size=PATCH, projection_dim=128,
    )  # fmt: skip
    torch.manual_seed(0)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=vocabulary["<image>"])
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    square = {"height": SIDE, "width": SIDE}
    files: dict[str, dict[str, Any]] = {
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": SIDE},
            "crop_size": square,
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "patch_size": PATCH,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
    }
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values))


def train(folder: Path, name: str, run: dict[str, Any]) -> None:
    """One run of the command, its output on stderr."""
    common = {
        "data": {"validation_fraction": 0, "packing": False, "cache": str(folder / "cache"), **run.pop("data")},
        "parallel": {"device": "cpu", "gpus": 1},
        "output": {"dir": str(folder / "runs")},
        "log": {"tensorboard": False},
        "checkpoint": {"every_steps": 0},
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({"name": name, **common, **run}))
    command = [sys.executable, "-m", "manyhands", "train", str(folder / f"{name}.yaml"), "--fresh"]
    subprocess.run(command, check=True, stdout=sys.stderr)


def losses_of(run: Path) -> Iterator[dict[str, Any]]:
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["kind"] == "evaluation":
            yield row


def compare_weights(before: Path, after: Path) -> dict[str, int]:
    """How many tensors of each part are the same bits, and how many are not."""
    from safetensors.torch import load_file

    first, second = (load_file(folder / "model.safetensors") for folder in (before, after))
    assert first.keys() == second.keys()
    counts: dict[str, int] = {}
    for name in first:
        part = next((p for p in ("vision_tower", "multi_modal_projector") if p in name), "language_model")
        same = bytes(first[name].numpy().data) == bytes(second[name].numpy().data)
        key = f"{part}: {'same bits' if same else 'changed'}"
        counts[key] = counts.get(key, 0) + 1
    return counts


def count_captions(model_folder: Path, folder: Path, name: str) -> tuple[int, int, list[str]]:
    """(captions that are written exactly, all, the first few): by transformers alone, from the saved folder."""
    import torch
    from transformers import AutoModelForMultimodalLM, AutoProcessor

    processor = AutoProcessor.from_pretrained(model_folder)
    model = AutoModelForMultimodalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    right, shown = 0, []
    for row in rows:
        parts = row["messages"][0]["content"]
        asked = [{"role": "user", "content": [{"type": "image", "path": str(folder / parts[0]["image"])}, parts[1]]}]
        made = processor.apply_chat_template(
            asked, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        new = model.generate(**made, max_new_tokens=12, do_sample=False)[0, made["input_ids"].shape[1] :]
        said = processor.tokenizer.decode(new, skip_special_tokens=True).strip()
        right += said == row["messages"][1]["content"]
        shown.append(f"{row['messages'][1]['content']} -> {said}")
    return right, len(rows), shown[:5]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100, help="of the projector's run")
    given = parser.parse_args()
    folder = given.folder
    folder.mkdir(parents=True, exist_ok=True)
    draw, photographs = random.Random(0), open_photographs()
    sets = {
        "shapes": [draw_shape(draw) for _ in range(640)],
        "shapes-held-out": [draw_shape(draw) for _ in range(60)],
    }
    if photographs:
        named = [caption for caption in photographs for _ in range(24)]
        sets["photographs"] = [(cut_crop(photographs[caption], draw), caption) for caption in named]
        named = [caption for caption in photographs for _ in range(5)]
        sets["photographs-held-out"] = [(cut_crop(photographs[caption], draw), caption) for caption in named]
    for name, pairs in sets.items():
        write_rows(folder, name, pairs)
    captions = [caption for pairs in sets.values() for _, caption in pairs]
    write_texts(folder, captions, draw)
    write_model(folder / "model", {word for caption in (*captions, QUESTION) for word in caption.split()})
    train(folder, "language", {
        "model": {"name": str(folder / "model")},
        "method": {"name": "full"},
        "data": {"train": str(folder / "texts.jsonl"), "max_length": 128},
        "batch": {"samples": 32}, "stop": {"epochs": 1}, "optimizer": {"learning_rate": 3e-3},
        "evaluate": {"prompts": 0},
    })  # fmt: skip
    held_out = {
        name.replace("-held-out", end): str(folder / f"{name}{end}.jsonl")
        for name in sets if name.endswith("held-out") for end in ("", "-exchanged")
    }  # fmt: skip
    train(folder, "projector", {
        "model": {"name": str(folder / "runs" / "language")},
        "method": {"parts": {"vision": "frozen", "projector": "trained", "language": "frozen"}},
        "data": {"train": [str(folder / f"{name}.jsonl") for name in sets if not name.endswith("held-out")],
                 "max_length": 128},
        "batch": {"samples": 32}, "stop": {"epochs": 100, "max_steps": given.steps},
        "optimizer": {"learning_rate": 5e-3},
        "evaluate": {"data": held_out, "prompts": 2, "max_new_tokens": 8, "every_steps": 0},
    })  # fmt: skip
    runs = folder / "runs"
    evaluations = list(losses_of(runs / "projector"))
    result = {
        "images": {name: len(pairs) for name, pairs in sets.items()},
        "held-out loss before": evaluations[0]["sets"],
        "held-out loss after": evaluations[-1]["sets"],
        "weights": compare_weights(runs / "language" / "model", runs / "projector" / "model"),
        "captions by transformers": {
            name: count_captions(runs / "projector" / "model", folder, name) for name in sets if "held-out" in name
        },
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
