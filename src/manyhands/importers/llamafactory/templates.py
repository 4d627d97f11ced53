"""The chat formats that LLaMA-Factory knows by name (``template: llama3``), as Jinja text for ``model.chat_template``.

Its formats are its own, not the models': ``llama3`` has no lines with dates, ``qwen`` always has a system prompt, and
those that think put an empty thought in front of answers without one. Each is a few pieces of text around the turns;
``{}`` is the content, ``{bos}`` and ``{eos}`` the tokenizer's tokens. A piece ``user`` ends with what opens the answer.

Not here, and rendered by the tokenizer's own template: formats that end only the last answer of a conversation, and
those of models of images and sound. Knows no tokenizer.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType

from manyhands.config.named_templates import fill_template
from manyhands.config.text import names

THOUGHT = ("<think>\n", "\n</think>\n\n")


@dataclass(frozen=True)
class ChatFormat:
    """The pieces of a format. ``merges_system``: the system prompt is written inside of the first question.

    ``default_system``: the prompt of conversations without one. ``thought``: what opens and closes a thought.
    """

    user: str
    answer: str = "{}{eos}"
    system: str = "{}"
    prefix: str = ""
    default_system: str = ""
    merges_system: bool = False
    thought: tuple[str, str] | None = None


def _chatml(default_system: str = "", *, prefix: str = "", thought: tuple[str, str] | None = None) -> ChatFormat:
    return ChatFormat(
        "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
        "{}<|im_end|>\n",
        "<|im_start|>system\n{}<|im_end|>\n",
        prefix,
        default_system,
        thought=thought,
    )


def _llama(start: str, end: str, close: str) -> ChatFormat:
    def header(role: str) -> str:
        return f"{start}{role}{end}\n\n"

    return ChatFormat(
        f"{header('user')}{{}}{close}{header('assistant')}", f"{{}}{close}", f"{header('system')}{{}}{close}", "{bos}"
    )


def _granite(default_system: str = "") -> ChatFormat:
    def header(role: str) -> str:
        return f"<|start_of_role|>{role}<|end_of_role|>"

    end = "<|end_of_text|>\n"
    return ChatFormat(
        f"{header('user')}{{}}{end}{header('assistant')}",
        f"{{}}{end}",
        f"{header('system')}{{}}{end}",
        default_system=default_system,
    )


_DEEPSEEK3 = ChatFormat("<｜User｜>{}<｜Assistant｜>", prefix="{bos}")
_SEED = ChatFormat("{bos}user\n{}{eos}{bos}assistant\n", system="{bos}system\n{}{eos}")

CHAT_FORMATS = MappingProxyType(
    {
        **dict.fromkeys(["chatml", "qwen3_5_nothink", "qwen3_nothink", "qwen3_vl_nothink", "smollm", "yi"], _chatml()),
        **dict.fromkeys(("cpm4", "falcon_h1"), _chatml(prefix="{bos}")),
        **dict.fromkeys(
            ("gemma", "gemma3", "gemma3n"),
            ChatFormat(
                "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n",
                "{}<end_of_turn>\n",
                "{}\n\n",
                "{bos}",
                merges_system=True,
            ),
        ),
        "llama2": ChatFormat("{bos}[INST] {} [/INST]", system="<<SYS>>\n{}\n<</SYS>>\n\n", merges_system=True),
        **dict.fromkeys(
            ("ministral", "ministral3"),
            ChatFormat("[INST]{}[/INST]", system="{}\n\n", prefix="{bos}", merges_system=True),
        ),
        "phi": ChatFormat("<|user|>\n{}<|end|>\n<|assistant|>\n", "{}<|end|>\n", "<|system|>\n{}<|end|>\n"),
        "qwen2_vl": _chatml("You are a helpful assistant."),
        **dict.fromkeys(("qwen3", "qwen3_5", "qwen3_6", "qwen3_vl"), _chatml(thought=THOUGHT)),
        "alpaca": ChatFormat(
            "### Instruction:\n{}\n\n### Response:\n",
            "{}{eos}\n\n",
            default_system="Below is an instruction that describes a task. Write a response that appropriately "
            "completes the request.\n\n",
        ),
        "cohere": ChatFormat(
            "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{}<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
            system="<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{}<|END_OF_TURN_TOKEN|>",
            prefix="{bos}",
        ),
        "deepseek": ChatFormat("User: {}\n\nAssistant:", system="{}\n\n", prefix="{bos}"),
        "deepseek3": _DEEPSEEK3,
        "deepseekr1": replace(_DEEPSEEK3, thought=THOUGHT),
        "default": ChatFormat("Human: {}{eos}\nAssistant:", "{}{eos}\n", "System: {}{eos}\n"),
        "ernie_nothink": ChatFormat(
            "User: {}\nAssistant: ", "{}<|end_of_sentence|>", "{}\n", prefix="<|begin_of_sentence|>"
        ),
        "exaone": ChatFormat("[|user|]{}\n[|assistant|]", "{}{eos}\n", "[|system|]{}[|endofturn|]\n"),
        "granite3": _granite(),
        "granite4": _granite("You are Granite, developed by IBM. You are a helpful AI assistant."),
        "hunyuan": ChatFormat("{}<|extra_0|>", "{}<|eos|>", "{}<|extra_4|>", "<|startoftext|>"),
        "lfm2": _chatml("You are a helpful AI assistant."),
        "llama3": _llama("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "llama4": _llama("<|header_start|>", "<|header_end|>", "<|eot|>"),
        "mimo": _chatml("You are a helpful assistant.", thought=THOUGHT),
        "mistral": ChatFormat("[INST] {}[/INST]", " {}{eos}", "{}\n\n", "{bos}", merges_system=True),
        "mistral_small": ChatFormat("[INST]{}[/INST]", system="[SYSTEM_PROMPT]{}[/SYSTEM_PROMPT]", prefix="{bos}"),
        "moonlight": ChatFormat(
            "<|im_user|>user<|im_middle|>{}<|im_end|><|im_assistant|>assistant<|im_middle|>",
            "{}<|im_end|>",
            "<|im_system|>system<|im_middle|>{}<|im_end|>",
            default_system="You are a helpful assistant provided by Moonshot-AI.",
        ),
        "olmo": ChatFormat("<|user|>\n{}<|assistant|>\n", prefix="{eos}"),
        "opencoder": _chatml("You are OpenCoder, created by OpenCoder Team."),
        "phi4": ChatFormat(
            "<|im_start|>user<|im_sep|>{}<|im_end|><|im_start|>assistant<|im_sep|>",
            "{}<|im_end|>",
            "<|im_start|>system<|im_sep|>{}<|im_end|>",
        ),
        "phi4_mini": ChatFormat("<|user|>{}<|end|><|assistant|>", "{}<|end|>", "<|system|>{}<|end|>"),
        "qwen": _chatml("You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
        "seed_oss": replace(_SEED, thought=("<seed:think>", "</seed:think>")),
        "smollm2": _chatml("You are a helpful AI assistant named SmolLM, trained by Hugging Face."),
        "starchat": ChatFormat("<|user|>\n{}<|end|>\n<|assistant|>", "{}<|end|>\n", "<|system|>\n{}<|end|>\n"),
        "vicuna": ChatFormat(
            "USER: {} ASSISTANT:",
            default_system="A chat between a curious user and an artificial intelligence assistant. The assistant "
            "gives helpful, detailed, and polite answers to the user's questions.",
        ),
        "zephyr": ChatFormat(
            "<|user|>\n{}{eos}<|assistant|>\n",
            system="<|system|>\n{}{eos}",
            default_system="You are Zephyr, a helpful assistant.",
        ),
    }
)
# Its other names.
OTHER_FORMATS = names(
    """
    aeva bailing bailing_v2 breeze chatglm3 chatml_de dbrx deepseekcoder dots_ocr empty ernie ernie_vl falcon fewshot
    gemma2 gemma4 gemma4n glm4 glm4_5v glm4_7 glm4_moe glm4v glm_ocr glmz1 gpt_oss granite3_vision hunyuan_small hy3
    hy_dense_1_8b hy_dense_7b index intern2 intern_s1 intern_vl keye_vl kimi_vl lfm2_vl llama2_zh llava llava_next
    llava_next_llama3 llava_next_mistral llava_next_qwen llava_next_video llava_next_video_mistral
    llava_next_video_yi llava_next_yi mimo_v2 mimo_vl minicpm_o minicpm_v minicpm_v_4_6 minimax1 minimax2 mllama
    moss_vl openchat openchat-3.6 paligemma paligemma_chat phi_small pixtral qwen2_audio qwen2_omni qwen3_omni
    qwen3_omni_nothink sailor seed_coder solar telechat2 video_llava xuanyuan yi_vl youtu youtu_vl yuan
    """
)


def make_chat_template(
    chat: ChatFormat, *, default_system: str | None = None, thinks: bool = True, last_thought_only: bool = False
) -> str:
    """Jinja text of a format. ``default_system`` replaces the format's own, "" leaves it out.

    For a format with thoughts: an answer without one gets an empty one, which belongs to the answer (and is trained) if
    the model ``thinks``, and else to what opens it; then thoughts are cut out of all answers. ``last_thought_only``
    cuts them out of all but the last answer, which alone gets an empty one.
    """
    default = chat.default_system if default_system is None else default_system
    pieces = {"write_prefix": chat.prefix, "write_system": chat.system, "write_user": chat.user}
    pieces["write_answer"] = chat.answer
    if chat.thought is None:
        merges = chat.merges_system
        return fill_template("llamafactory", ("content",), pieces, default_system=default, merges_system=merges)
    return fill_template(
        "llamafactory-thoughts",
        ("content",),
        pieces,
        default_system=default,
        opening=chat.thought[0],
        closing=chat.thought[1],
        thinks=thinks,
        last_thought_only=last_thought_only,
    )
