"""Model types of images and text whose images cannot be trained here, each with its reason; and those of sound.

Of transformers' AutoModelForMultimodalLM and AutoModelForImageTextToText every model type is here, in another file of
this package, or in ``INFERRED``: a test compares them, and docs/vision.md with all three.
"""

from __future__ import annotations

ENCODER = "its decoder attends to an encoder, which is not supported"
CROSS_ATTENTION = "images reach its text through layers of cross-attention, which text alone skips"
QUERIES = "its query transformer stands around a text model whose head takes more than hidden states, or an encoder"
NO_SDPA = "transformers computes its attention in plain torch alone"
TIMM = "its vision tower is a model of timm, which manyhands does not install"
OWN_SIZE = "each image keeps its own size, and a batch pads it to the largest with a mask"
CODEBOOK = "its images become tokens of a codebook, which it also predicts"
POSITIONS = "which positions its tokens of images have, by row and column, is not described yet"
OMNI = "a part that speaks hangs on the hidden states of its text, and positions depend on sound"
SOUND = "it takes sound, and no images"
HYBRID = "its layers that are not attention have not been tried in packs"
INDEXER = "a part of its attention chooses tokens and gets no gradient"
OWN_EXPERTS = "its experts have a forward pass of their own, which cannot be replaced"
TWO_KINDS = "its tokens of images and of text have experts of their own"
DIFFUSION = "it learns to restore blocks of tokens, not to predict the next one"

_EXPERTS = {
    HYBRID: "zaya inkling inkling_text",
    INDEXER: "deepseek_v32 glm_moe_dsa axk2 hy_v4 deepseek_v4 qwen4_exp qwen4_exp_text glm5_next_text "
    "minimax_m3_vl_text",
    OWN_EXPERTS: "aria_text step3p5",
    TWO_KINDS: "ernie4_5_vl_moe_text",
    "its tokens attend in both directions": "openai_privacy_filter",
    DIFFUSION: "diffusion_gemma",
}
EXPERTS_REFUSED = {name: reason for reason, names in _EXPERTS.items() for name in names.split()}
"""Model types with experts that cannot be trained here, each with its reason."""

STRUCTURE_REFUSED = dict.fromkeys(
    ("zamba", "zamba2"), "some of its blocks share one attention, and weights are counted and sharded by blocks here"
)
"""Model types of text that cannot be trained here for another reason."""

INFERRED = ("aya_vision", "cohere2_vision", "deepseek_vl", "janus", "qianfan_ocr", "vipllava")
"""Model types without a file of their own whose images were trained by what is inferred of them, with 5.17."""

_ALIKE = {
    INDEXER: "glm5_next minimax_m3_vl qwen4_exp",
    OWN_EXPERTS: "aria step3p7",
    ENCODER: "florence2 pix2struct pp_formulanet t5gemma2 udop vision-encoder-decoder",
    CROSS_ATTENTION: "blip idefics mllama",
    QUERIES: "blip-2 instructblip instructblipvideo",
    NO_SDPA: "got_ocr2 pp_chart2table",
    TIMM: "fast_vlm gemma3n perception_lm",
    OWN_SIZE: "idefics2 minicpmv4_6",
    CODEBOOK: "chameleon emu3",
    POSITIONS: "cohere_compass cosmos3_edge cosmos3_omni glm_ocr glmga hunyuan_vl paddleocr_vl",
    OMNI: "qwen2_5_omni qwen2_5_omni_thinker qwen3_omni_moe qwen3_omni_moe_thinker",
    SOUND: "fun_asr_nano glmasr granite_speech granite_speech_plus kyutai_speech_to_text qwen2_audio qwen3_asr "
    "vibevoice_asr voxtral voxtral_realtime",
}
IMAGES_REFUSED: dict[str, str] = {name: reason for reason, names in _ALIKE.items() for name in names.split()} | {
    "deepseek_ocr2": "crops of an image are an input of their own, beside the whole image",
    "deepseek_vl_hybrid": "each image is prepared twice, for towers of two resolutions",
    "diffusion_gemma": DIFFUSION,
    "ernie4_5_vl_moe": TWO_KINDS,
    "evolla": "it takes proteins, and no images",
    "fuyu": "it has no vision tower: patches of an image are projected straight to the embeddings",
    "git": "an image stands before the text without placeholders",
    "granite4_vision": "features of an image go into several layers of its text",
    "inkling_mm_model": HYBRID,
    "kosmos-2": "images are placed by a mask beside the tokens, not by a token of their own",
    "kosmos-2.5": "images are placed by a mask beside the tokens, not by a token of their own",
    "mistral4": "it is text alone: the model of images around it is mistral3",
    "ovis2": "further features of its own stand where an image begins and ends",
    "paligemma": "it reads its prompt in both directions and its answer in one: attention of a prefix is not supported",
    "phi4_multimodal": "adapters inside its weights are switched by whether a sample has images or sound",
    "pi0": "it predicts the movements of a robot",
    "shieldgemma2": "it judges images: it answers yes or no by two rows of its head",
    "video_llama_3": "each image says by how much its patches are merged",
    "video_llava": "images and the frames of videos have a tower and names of their own",
}
