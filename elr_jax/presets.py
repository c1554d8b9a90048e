"""Named models, each with the table its numbers come from."""

from elr_jax.config import AttentionConfig, LoopRule, MLPConfig, ModelConfig

PLAIN = LoopRule(update="replace", max_loops=1)
"""The loop rule under which a config is a plain transformer: every layer once."""


def tiny_text(loop: LoopRule | None = None) -> ModelConfig:
    """A byte-level model for two CPU cores: width 128, blocks 1 | 2 | 1; adaptive delta, up to 4 loops."""
    return ModelConfig(
        vocab_size=257,
        d_model=128,
        prelude="*-",
        core="*-*-",
        coda="*-",
        attention=AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=32),
        mlp=MLPConfig(d_ff=512, kind="squared_relu"),
        loop=loop or LoopRule(max_loops=4),
    )


def tiny_pointer_chase(loop: LoopRule | None = None) -> ModelConfig:
    """The pointer-chase model: width 64, the only attention in the loop; adaptive delta, trained at 1–4, run to 6.

    Without positions, since edges are a set.
    """
    return ModelConfig(
        vocab_size=104,
        d_model=64,
        prelude="-",
        core="*-",
        coda="-",
        attention=AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=16, rope_base=None),
        mlp=MLPConfig(d_ff=256, kind="squared_relu"),
        loop=loop or LoopRule(max_loops=6),
        residual_init="zero",
    )
