"""The configurations that checkpoints are written with: the release's own, and a miniature of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from export.checkpoint.components.audio_vae import AudioVAEConfig
from export.checkpoint.components.denoiser import DenoiserConfig
from export.checkpoint.components.processor import Pictures, PixelLimits, ProcessorConfig
from export.checkpoint.components.text_encoder import TextEncoderConfig
from export.checkpoint.components.video_vae import VideoVAEConfig

# fmt: off
VIDEO_LATENTS_MEAN = (
    0.858090341091156, -0.9606591463088989, 1.0661640167236328, -0.5090325474739075, -0.2727581858634949,
    -1.3675414323806763, -0.2553254961967468, -0.26907554268836975, -0.5376840829849243, -0.0464097298681736,
    0.6657370328903198, 0.19690127670764923, -0.5460608005523682, -0.4035342037677765, -0.23683024942874908,
    0.25928452610969543, -0.30133944749832153, 0.211341992020607, -1.1206848621368408, 0.3581933379173279,
    -0.04225143790245056, 0.2604829967021942, 0.22864092886447906, 0.7056031823158264,
)
VIDEO_LATENTS_STD = (
    1.2223774194717407, 1.2767263650894165, 1.6831774711608887, 1.7549455165863037, 1.5636216402053833,
    2.194143533706665, 0.9653137922286987, 1.0569885969161987, 0.841948926448822, 0.7729952931404114,
    1.8955937623977661, 0.946841835975647, 0.7996809482574463, 0.44988900423049927, 0.7197399735450745,
    0.6936293244361877, 2.961095094680786, 2.7694199085235596, 3.0496184825897217, 2.1088054180145264,
    3.276226282119751, 3.1627357006073, 2.2816812992095947, 2.6127843856811523,
)
AUDIO_LATENTS_MEAN = (
    -0.020211687488382354, 0.3876466479950502, -0.04398279799186767, -0.28591514936373, 0.08179686214561671,
    -0.35782641352446604, 0.040623809960919084, -0.01552534501956604, -0.223362481667332, 0.1821006842509091,
    0.2941778783780663, -0.07901167601970885, -0.056815072777201, -0.3699028221860095, -0.31616315591624855,
    0.5905951377425391, -0.052139568068853864, 0.013673160263486295, -0.03691647864630577, 0.09732660653298163,
    -0.3394662328788498, -0.30685677538541667, -0.24504598907458763, -0.034698524462007344, 0.02868032184767538,
    -0.21217779266454084, -0.1678263169941987, 0.3221287889040614, -0.1223055851554907, 0.4356604928128464,
    -0.0502599202236253, 0.3979258376211797,
)
AUDIO_LATENTS_STD = (
    1.6895524230479284, 2.76263727217653, 1.7945344281264435, 1.6801681847309828, 1.6390226546605453,
    2.7788298348882177, 1.7659090095747236, 1.6199757612137327, 2.6336525640336896, 1.8539356672817833,
    2.5056497896915633, 1.811019237886178, 1.9579657790720237, 1.6685498243529284, 1.4922469314453364,
    3.298670198067373, 1.9491804496832168, 1.8720003270431442, 1.8334080103291832, 1.6488070416529093,
    1.6176957696319716, 1.9131449234774398, 1.5695245398428617, 1.6943659940415912, 1.8318420762504692,
    1.5540637421583379, 1.9344930328968526, 1.599198216109855, 1.718045989838149, 1.6307219190837705,
    1.8661226051202384, 1.5613768203168363,
)
# fmt: on

PICTURES = Pictures(
    images=ProcessorConfig(
        size=PixelLimits(shortest_edge=65536, longest_edge=16777216),
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
        image_mean=(0.5, 0.5, 0.5),
        image_std=(0.5, 0.5, 0.5),
    ),
    videos=PixelLimits(shortest_edge=4096, longest_edge=25165824),
)
"""How the release prepares images and videos for the vision tower; the miniature does the same."""


@dataclass(frozen=True)
class Shards:
    """How many files a sharded component is cut into, in each layout."""

    denoiser_native: int
    denoiser_diffusers: int
    text_encoder: int
    video_vae_diffusers: int


@dataclass(frozen=True)
class Sizes:
    """One model's configurations and the sharding of its files."""

    denoiser: DenoiserConfig
    text_encoder: TextEncoderConfig
    video_vae: VideoVAEConfig
    audio_vae: AudioVAEConfig
    shards: Shards


RELEASED_IDS = {
    "<|endoftext|>": 151643,
    "<|im_end|>": 151645,
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|image_pad|>": 151655,
    "<|video_pad|>": 151656,
}
"""The release's ids of the tokens that configurations name (spec/model.md 7.1)."""


def released(special_ids: dict[str, int]) -> Sizes:
    """The release: 33.1 B transformer, Qwen3-VL-32B, 2.6 B video VAE, 151 M audio VAE."""
    text: dict[str, Any] = {"hidden_size": 5120, "num_attention_heads": 64, "head_dim": 128, "intermediate_size": 25600}
    text |= {"num_hidden_layers": 64, "vocab_size": 151936}
    vision: dict[str, Any] = {
        "depth": 27,
        "hidden_size": 1152,
        "num_heads": 16,
        "intermediate_size": 4304,
        "out_hidden_size": 5120,
    }
    vision |= {"num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24]}
    return Sizes(
        denoiser=DenoiserConfig(),
        text_encoder=_text_encoder(text, vision, [24, 20, 20], special_ids),
        video_vae=VideoVAEConfig(latents_mean=VIDEO_LATENTS_MEAN, latents_std=VIDEO_LATENTS_STD),
        audio_vae=AudioVAEConfig(latents_mean=AUDIO_LATENTS_MEAN, latents_std=AUDIO_LATENTS_STD),
        shards=Shards(denoiser_native=13, denoiser_diffusers=14, text_encoder=14, video_vae_diffusers=3),
    )


def miniature(special_ids: dict[str, int], vocab: int) -> Sizes:
    """The release's architecture at about 10 M parameters; what algorithms depend on is kept.

    Kept: head_dim 128 and 8 heads (so that 8 ranks are possible), the rotary split, channels and patches of both
    latents, clip and tile sizes, 50 conditioning layers of more, grouped key/value heads, the audio rates.
    """
    text: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 16, "head_dim": 16, "intermediate_size": 64}
    text |= {"num_hidden_layers": 52, "vocab_size": vocab}
    vision: dict[str, Any] = {
        "depth": 4,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 64,
        "out_hidden_size": 64,
    }
    vision |= {"num_position_embeddings": 256, "deepstack_visual_indexes": [0, 1, 2]}
    return Sizes(
        denoiser=DenoiserConfig(
            num_attention_heads=8,
            hidden_size=192,
            num_layers=2,
            ffn_dim=256,
            text_dim=64,
            time_embed_hidden_dim=128,
            time_embed_dim=64,
        ),
        text_encoder=_text_encoder(text, vision, [4, 2, 2], special_ids),
        video_vae=VideoVAEConfig(
            block_out_channels=(32, 32, 32, 32, 32, 64),
            layers_per_block=1,
            decoder_num_layers=2,
            decoder_num_attention_heads=2,
            latents_mean=VIDEO_LATENTS_MEAN,
            latents_std=VIDEO_LATENTS_STD,
        ),
        audio_vae=AudioVAEConfig(
            encoder_dim=4,
            latent_dim=64,
            decoder_dim=128,
            latents_mean=AUDIO_LATENTS_MEAN,
            latents_std=AUDIO_LATENTS_STD,
        ),
        shards=Shards(denoiser_native=2, denoiser_diffusers=2, text_encoder=2, video_vae_diffusers=2),
    )


def _text_encoder(
    text: dict[str, Any], vision: dict[str, Any], sections: list[int], special_ids: dict[str, int]
) -> TextEncoderConfig:
    rotary = {"mrope_interleaved": True, "mrope_section": sections, "rope_type": "default"}
    return TextEncoderConfig.model_validate(
        {
            "image_token_id": special_ids["<|image_pad|>"],
            "video_token_id": special_ids["<|video_pad|>"],
            "vision_start_token_id": special_ids["<|vision_start|>"],
            "vision_end_token_id": special_ids["<|vision_end|>"],
            "tie_word_embeddings": False,
            "text_config": {
                "model_type": "qwen3_vl_text",
                "attention_bias": False,
                "attention_dropout": 0.0,
                "bos_token_id": special_ids["<|endoftext|>"],
                "eos_token_id": special_ids["<|im_end|>"],
                "hidden_act": "silu",
                "initializer_range": 0.02,
                "max_position_embeddings": 262144,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-6,
                "rope_scaling": rotary,
                "rope_theta": 5000000,
                "use_cache": True,
                **text,
            },
            "vision_config": {
                "model_type": "qwen3_vl",
                "hidden_act": "gelu_pytorch_tanh",
                "in_channels": 3,
                "initializer_range": 0.02,
                "patch_size": 16,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                **vision,
            },
        }
    )
