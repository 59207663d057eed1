"""Sixty and more families of Hugging Face models, each small, with a batch as its users would pass it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from extras import needed

transformers: Any = needed("transformers", extra="hf")
VOCABULARY = 99
Batch = dict[str, Any]


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(rows: int, length: int = 9, *, seed: int = 0) -> Batch:
    """Return token ids with padding at the end of most rows, unevenly many, and labels that leave it out."""
    ids = torch.randint(5, VOCABULARY - 5, (rows, length), generator=_random(seed))
    mask = torch.ones(rows, length, dtype=torch.long)
    for row in range(rows):
        mask[row, length - (row * row) % 5 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def unpadded(rows: int) -> Batch:
    batch = tokens(rows)
    return {"input_ids": batch["input_ids"], "labels": batch["labels"]}


def classes(rows: int) -> Batch:
    return tokens(rows) | {"labels": torch.arange(rows) % 2}


def spans(rows: int) -> Batch:
    """Return text with answers, some of which lie outside of it and do not count."""
    batch = tokens(rows)
    del batch["labels"]
    starts = torch.tensor([1, 2, 50, 3, 50, 50, 4, 1] * rows)[:rows]
    ends = torch.tensor([2, 3, 4, 50, 50, 6, 50, 3] * rows)[:rows]
    return batch | {"start_positions": starts, "end_positions": ends}


def both_heads(rows: int) -> Batch:
    ids = torch.randint(5, VOCABULARY - 5, (rows, 2, 7), generator=_random(0))
    labels = ids.clone()
    labels[: rows // 2, :, 3:] = -100
    return {
        "input_ids": ids,
        "mc_token_ids": torch.full((rows, 2), 6),
        "labels": labels,
        "mc_labels": torch.arange(rows) % 2,
    }


def pictures(rows: int, size: int = 32) -> Batch:
    pixels = torch.randn(rows, 3, size, size, generator=_random(1))
    return {"pixel_values": pixels, "labels": torch.arange(rows) % 2}


def masked_pictures(rows: int) -> Batch:
    """Return pictures of which unevenly many patches are masked."""
    masked = torch.arange(16)[None] < (torch.arange(rows)[:, None] * 3 % 11 + 1)
    return {"pixel_values": pictures(rows)["pixel_values"], "bool_masked_pos": masked}


def noisy_pictures(rows: int) -> Batch:
    """Return pictures with the noise that says which patches are masked."""
    return {"pixel_values": pictures(rows)["pixel_values"], "noise": torch.rand(rows, 16, generator=_random(8))}


def segments(rows: int) -> Batch:
    labels = torch.randint(0, 2, (rows, 32, 32), generator=_random(2))
    labels[: rows // 2, :20] = 255  # not labelled
    return {"pixel_values": pictures(rows)["pixel_values"], "labels": labels}


def seq2seq(rows: int) -> Batch:
    batch = tokens(rows)
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "labels": batch["labels"][:, :7].clone(),
    }


def spoken(rows: int) -> Batch:
    """Return spectrograms with transcripts."""
    features = torch.randn(rows, 8, 40, generator=_random(3))
    return {"input_features": features, "labels": tokens(rows, 6)["labels"]}


def speech_to_text(rows: int) -> Batch:
    features = torch.randn(rows, 40, 8, generator=_random(3))
    return {"input_features": features, "labels": tokens(rows, 6)["labels"]}


def waves(rows: int) -> Batch:
    return {"input_values": torch.randn(rows, 800, generator=_random(4)), "labels": torch.arange(rows) % 2}


def transcribed(rows: int) -> Batch:
    """Return waves with transcripts of other lengths."""
    return {"input_values": waves(rows)["input_values"], "labels": tokens(rows, 6)["labels"]}


def replaced(rows: int) -> Batch:
    """Return texts with labels that say which words were replaced."""
    batch = tokens(rows)
    return batch | {"labels": batch["input_ids"] % 2}


def spectrograms(rows: int) -> Batch:
    return {"input_values": torch.randn(rows, 40, 16, generator=_random(4)), "labels": torch.arange(rows) % 2}


def series(rows: int) -> Batch:
    values = torch.randn(rows, 24, 2, generator=_random(5))
    return {"past_values": values, "future_values": torch.randn(rows, 8, 2, generator=_random(6))}


def captioned(rows: int) -> Batch:
    """Return pictures and a text for each."""
    batch = tokens(rows)
    return {"pixel_values": pictures(rows)["pixel_values"], "input_ids": batch["input_ids"]}


def picture_chat(rows: int, *, image: int, num_image_tokens: int) -> Batch:
    """Return texts that begin with the places of a picture."""
    batch = tokens(rows, 6)
    places = torch.full((rows, num_image_tokens), image)
    ids = torch.cat([places, batch["input_ids"]], dim=1)
    labels = torch.cat([torch.full_like(places, -100), batch["labels"]], dim=1)
    return {
        "pixel_values": pictures(rows)["pixel_values"],
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": labels,
    }


def packed_chat(rows: int) -> Batch:
    """Return texts with a picture each, all pictures' patches packed into one tensor, as Qwen2-VL takes them."""
    batch = picture_chat(rows, image=90, num_image_tokens=4)
    ids = batch["input_ids"]
    start, end = torch.full((rows, 1), 91), torch.full((rows, 1), 92)
    ids = torch.cat([start, ids[:, :4], end, ids[:, 4:]], dim=1)
    labels = torch.cat([batch["labels"][:, :2], batch["labels"]], dim=1)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": labels,
        "pixel_values": torch.randn(rows * 16, 3 * 2 * 4 * 4, generator=_random(7)),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * rows),
        # Three positions for every token, as the model's own get_rope_index makes them of text and pictures.
        "position_ids": torch.arange(ids.shape[1]).expand(3, rows, -1).clone(),
    }


def images_to_text(rows: int) -> Batch:
    return {"pixel_values": pictures(rows)["pixel_values"], "labels": tokens(rows, 6)["labels"]}


@dataclass(frozen=True)
class Family:
    """A model of a family: what it is called, what its configuration gets, and a batch of some rows."""

    model: str
    config: str
    batch: Callable[[int], Batch]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)  # what step is given besides
    group: str = "text"
    settings: Mapping[str, Any] = field(default_factory=dict)  # what Pipeline needs for its own loss


_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "d_model": 16,
    "n_embd": 16,
    "intermediate_size": 32,
    "ffn_dim": 32,
    "d_ff": 32,
    "n_inner": 32,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "d_kv": 8,
    "d_inner": 32,
    "num_hidden_layers": 4,
    "num_layers": 3,
    "n_layer": 4,
    "n_layers": 4,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "num_decoder_layers": 3,
    "num_attention_heads": 2,
    "num_heads": 2,
    "n_head": 2,
    "n_heads": 2,
    "attention_heads": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "embedding_size": 16,
    "word_embed_proj_dim": 16,
    "dim": 16,
    "hidden_dim": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "shared_expert_intermediate_size": 16,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "rotary_dim": 4,
    "sliding_window": 4,
    "attention_types": [[["global", "local"], 2]],
    "state_size": 4,
    "time_step_rank": 4,
    "max_source_positions": 40,
    "max_target_positions": 40,
    "num_mel_bins": 8,
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "num_labels": 2,
    "num_nextn_predict_layers": 0,
    "scale_embedding": False,
    "type_vocab_size": 2,
    "conv_dim": [16, 16],
    "conv_kernel": [5, 3],
    "conv_stride": [4, 2],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "layer_types": None,
    "projection_dim": 8,
}
_STAGES: dict[str, Any] = {
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [1, 2],
    "window_size": 2,
    "patch_size": 4,
    "image_size": 32,
}
_VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 16, "projection_dim": 16,
}  # fmt: skip
_LM = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def _text(
    name: str,
    head: str = "ForCausalLM",
    batch: Any = tokens,
    *,
    group: str = "causal",
    settings: Mapping[str, Any] | None = None,
    **sizes: Any,
) -> Family:
    return Family(f"{name}{head}", f"{name}Config", batch, sizes, group=group, settings=settings or {})


def by_rows(inputs: Any) -> int:
    """Return what a microbatch of pictures counts where the model itself says which patches are masked."""
    return len(inputs.kwargs["pixel_values"])


def by_texts(inputs: Any) -> int:
    """Return what a microbatch of texts counts, each of which has a label."""
    return len(inputs.kwargs["input_ids"])


FAMILIES: dict[str, Family] = {
    "llama": _text("Llama"),
    "mistral": _text("Mistral"),
    "qwen2": _text("Qwen2", tie_word_embeddings=True),
    "qwen3": _text("Qwen3"),
    "gemma2": _text("Gemma2"),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        tokens,
        {"layer_types": ["sliding_attention", "full_attention"] * 2},
        group="causal",
    ),
    "phi3": _text("Phi3", rope_scaling=None),
    "gpt2": _text("GPT2", "LMHeadModel"),
    "gpt2_double_heads": _text("GPT2", "DoubleHeadsModel", both_heads, num_labels=1, summary_use_proj=True),
    "gpt_neo": _text("GPTNeo"),
    "gpt_neox": _text("GPTNeoX"),
    "gptj": _text("GPTJ"),
    "opt": _text("OPT"),
    "bloom": _text("Bloom"),
    "falcon": _text("Falcon", head_dim=None),
    "olmo2": _text("Olmo2"),
    "cohere2": _text("Cohere2"),
    "starcoder2": _text("Starcoder2"),
    "stablelm": _text("StableLm"),
    "granite": _text("Granite"),
    "glm4": _text("Glm4"),
    "mamba": _text("Mamba", batch=unpadded, conv_kernel=4),
    "recurrent_gemma": _text("RecurrentGemma", batch=unpadded, lru_width=16, attention_window_size=4),
    "mixtral": _text("Mixtral", group="MoE"),
    "mixtral_with_router_loss": _text("Mixtral", group="MoE", output_router_logits=True),
    "mixtral_with_router_loss_unmasked": _text("Mixtral", batch=unpadded, group="MoE", output_router_logits=True),
    "qwen2_moe": _text("Qwen2Moe", group="MoE", decoder_sparse_step=1),
    "qwen3_moe": _text("Qwen3Moe", group="MoE", decoder_sparse_step=1),
    "qwen3_moe_with_router_loss_unmasked": _text(
        "Qwen3Moe", batch=unpadded, group="MoE", decoder_sparse_step=1, output_router_logits=True
    ),
    "olmoe": _text("Olmoe", group="MoE"),
    "olmoe_with_router_loss": _text("Olmoe", group="MoE", output_router_logits=True),
    "deepseek_v3": _text("DeepseekV3", group="MoE", head_dim=4),
    "gpt_oss": _text("GptOss", group="MoE"),
    "switch_transformers": _text(
        "SwitchTransformers",
        "ForConditionalGeneration",
        seq2seq,
        group="MoE",
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        router_jitter_noise=0.0,
        decoder_start_token_id=0,
    ),
    "bert": _text("Bert", "ForMaskedLM", group="encoder"),
    "bert_answers": _text("Bert", "ForQuestionAnswering", spans, group="encoder"),
    "roberta": _text("Roberta", "ForSequenceClassification", classes, group="encoder"),
    "distilbert": _text("DistilBert", "ForTokenClassification", group="encoder", num_labels=VOCABULARY),
    "electra": _text("Electra", "ForMaskedLM", group="encoder"),
    "electra_pretraining": _text("Electra", "ForPreTraining", replaced, group="encoder"),
    "albert": _text("Albert", "ForMaskedLM", group="encoder"),
    "deberta_v2": _text(
        "DebertaV2", "ForSequenceClassification", classes, group="encoder", settings={"loss_weight": by_texts}
    ),
    "deberta_v2_single_label": _text(
        "DebertaV2",
        "ForSequenceClassification",
        classes,
        group="encoder",
        problem_type="single_label_classification",
    ),
    "longformer": _text("Longformer", "ForMaskedLM", group="encoder", attention_window=4),
    "modernbert": _text("ModernBert", "ForMaskedLM", group="encoder"),
    "t5": _text("T5", "ForConditionalGeneration", seq2seq, group="encoder-decoder", decoder_start_token_id=0),
    "umt5": _text("UMT5", "ForConditionalGeneration", seq2seq, group="encoder-decoder"),
    "bart": _text("Bart", "ForConditionalGeneration", seq2seq, group="encoder-decoder"),
    "pegasus": _text("Pegasus", "ForConditionalGeneration", seq2seq, group="encoder-decoder"),
    "marian": _text("Marian", "MTModel", seq2seq, group="encoder-decoder", decoder_vocab_size=VOCABULARY),
    "m2m_100": _text("M2M100", "ForConditionalGeneration", seq2seq, group="encoder-decoder"),
    "vit": _text("ViT", "ForImageClassification", pictures, group="vision"),
    "vit_masked": _text("ViT", "ForMaskedImageModeling", masked_pictures, group="vision", encoder_stride=8),
    "vit_mae": _text(
        "ViTMAE",
        "ForPreTraining",
        noisy_pictures,
        group="vision",
        settings={"loss_weight": by_rows},
        decoder_num_attention_heads=2,
        decoder_hidden_size=16,
        decoder_num_hidden_layers=2,
        decoder_intermediate_size=32,
    ),
    "deit": _text("DeiT", "ForImageClassification", pictures, group="vision"),
    "beit": _text("Beit", "ForImageClassification", pictures, group="vision"),
    "dinov2": _text("Dinov2", "ForImageClassification", pictures, group="vision"),
    "swin": _text(
        "Swin",
        "ForImageClassification",
        pictures,
        group="vision",
        num_attention_heads=None,
        num_hidden_layers=None,
        num_layers=None,
        hidden_size=None,
        **_STAGES,
    ),
    "convnext": _text(
        "ConvNext",
        "ForImageClassification",
        pictures,
        group="vision",
        hidden_sizes=[4, 8, 8, 16],
        depths=[1, 1, 1, 1],
        num_stages=4,
        patch_size=4,
    ),
    "resnet": _text(
        "ResNet",
        "ForImageClassification",
        pictures,
        group="vision",
        hidden_sizes=[8, 16],
        depths=[2, 2],
        embedding_size=8,
    ),
    "mobilenet_v2": _text("MobileNetV2", "ForImageClassification", pictures, group="vision", depth_multiplier=0.25),
    "segformer": _text(
        "Segformer",
        "ForSemanticSegmentation",
        segments,
        group="vision",
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_encoder_blocks=2,
        sr_ratios=[2, 1],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=8,
        patch_size=None,
    ),
    "whisper": _text("Whisper", "ForConditionalGeneration", spoken, group="audio", max_source_positions=20),
    "speech_to_text": _text(
        "Speech2Text",
        "ForConditionalGeneration",
        speech_to_text,
        group="audio",
        input_feat_per_channel=8,
        conv_channels=16,
    ),
    "wav2vec2": _text("Wav2Vec2", "ForSequenceClassification", waves, group="audio", classifier_proj_size=8),
    "wav2vec2_ctc": _text("Wav2Vec2", "ForCTC", transcribed, group="audio"),
    "wav2vec2_ctc_mean": _text("Wav2Vec2", "ForCTC", transcribed, group="audio", ctc_loss_reduction="mean"),
    "hubert": _text("Hubert", "ForSequenceClassification", waves, group="audio", classifier_proj_size=8),
    "ast": _text("AST", "ForAudioClassification", spectrograms, group="audio", max_length=40, num_mel_bins=16),
    "patchtst": _text(
        "PatchTST",
        "ForPrediction",
        series,
        group="series",
        num_input_channels=2,
        context_length=24,
        prediction_length=8,
        patch_length=6,
        patch_stride=6,
        ffn_dim=16,
        loss="mse",
    ),
    "clip": Family(
        "CLIPModel",
        "CLIPConfig",
        captioned,
        {
            "text_config": _LM | {"model_type": "clip_text_model", "eos_token_id": 2, "projection_dim": 16},
            "vision_config": _VISION | {"model_type": "clip_vision_model"},
        },
        {"return_loss": True},
        group="vision-language",
    ),
    "siglip": Family(
        "SiglipModel",
        "SiglipConfig",
        captioned,
        {
            "text_config": _LM | {"model_type": "siglip_text_model", "projection_size": 16},
            "vision_config": _VISION | {"model_type": "siglip_vision_model"},
        },
        {"return_loss": True},
        group="vision-language",
    ),
    "vision_encoder_decoder": Family(
        "VisionEncoderDecoderModel",
        "VisionEncoderDecoderConfig",
        images_to_text,
        {
            "encoder": _VISION | {"model_type": "vit"},
            "decoder": _LM | {"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
            "pad_token_id": 0,
            "decoder_start_token_id": 1,
        },
        group="vision-language",
    ),
    "llava": Family(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        lambda rows: picture_chat(rows, image=97, num_image_tokens=4),
        {
            "text_config": _LM,
            "vision_config": _VISION | {"model_type": "clip_vision_model"},
            "image_token_id": 97,
            "image_token_index": 97,
        },
        group="vision-language",
    ),
    "paligemma": Family(
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        lambda rows: (
            picture_chat(rows, image=97, num_image_tokens=4)
            | {"token_type_ids": torch.cat([torch.zeros(rows, 5), torch.ones(rows, 5)], 1).long()}
        ),
        {
            "text_config": _LM | {"model_type": "gemma"},
            "vision_config": _VISION | {"model_type": "siglip_vision_model"},
            "image_token_id": 97,
            "image_token_index": 97,
            "projection_dim": 16,
            "hidden_size": 16,
        },
        group="vision-language",
    ),
    "qwen2_vl": Family(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        packed_chat,
        {
            "text_config": _LM
            | {
                "model_type": "qwen2_vl_text",
                "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
            },
            "vision_config": {
                "depth": 3,
                "embed_dim": 16,
                "hidden_size": 16,
                "num_heads": 2,
                "patch_size": 4,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "mlp_ratio": 2,
            },
            "image_token_id": 90,
            "vision_start_token_id": 91,
            "vision_end_token_id": 92,
            "video_token_id": 93,
        },
        group="vision-language",
    ),
}


def made(name: str, *, seed: int = 0) -> nn.Module:
    """Return a family's model, small, without dropout, its statistics of batches frozen."""
    family = FAMILIES[name]
    kind: Any = getattr(transformers, family.config)
    sizes: dict[str, Any] = {}
    if family.group != "vision-language":  # of whose parts each has its own
        known = kind()
        sizes = {key: value for key, value in _TEXT.items() if hasattr(known, key)}
    sizes = {key: value for key, value in (sizes | copy.deepcopy(dict(family.sizes))).items() if value is not None}
    torch.manual_seed(seed)
    model: nn.Module = getattr(transformers, family.model)(kind(**sizes)).train()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.eval()
        for key in ("dropout", "attention_dropout", "activation_dropout", "drop_prob"):
            if isinstance(getattr(module, key, None), float):
                setattr(module, key, 0.0)
    return model
