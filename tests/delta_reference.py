"""A Gated DeltaProduct layer written plainly: one token after another, from lists of what earlier tokens left."""

from typing import NamedTuple

import numpy as np


class Left(NamedTuple):
    """What one token leaves for later ones: its inputs of the convolution, and what it does to the state."""

    inputs: dict
    key: np.ndarray
    value: np.ndarray
    beta: np.ndarray
    g: np.ndarray


def silu(x):
    return x / (1 + np.exp(-x))


def unit(x, eps):
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + eps)


def rms(x, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def delta_layer(x, params, config, past):
    """Outputs of new tokens x [T,D] after those that left `past`, and what the new ones leave."""
    delta = config.delta
    share = delta.num_heads // delta.num_key_heads
    params = params.replace(**{name: np.asarray(leaf, np.float64) for name, leaf in flat(params).items()})
    made, out = [], []
    for token in np.asarray(x, np.float64):
        inputs = {name: np.tensordot(token, np.asarray(w), 1) for name, w in vars(params.project).items()}
        window = [left.inputs for left in [*past, *made]][-(delta.conv_size - 1) :] if delta.conv_size > 1 else []
        mixed = {}
        for name, taps in vars(params.convolve).items():
            seen = [before[name] for before in window] + [inputs[name]]
            mixed[name] = silu(sum(w * y for w, y in zip(np.asarray(taps)[-len(seen) :], seen, strict=True)))
        query = np.repeat(unit(mixed["query"], config.norm_eps), share, axis=-2)
        beta = 1 / (1 + np.exp(-np.tensordot(token, params.step_size, 1)))
        made.append(
            Left(
                inputs=inputs,
                key=np.repeat(unit(mixed["key"], config.norm_eps), share, axis=-2),
                value=mixed["value"],
                beta=beta * (2 if delta.negative_eigenvalues else 1),
                g=-np.exp(params.a_log) * np.logaddexp(0, token @ params.decay + params.dt_bias),
            )
        )
        read = np.einsum("nh,nhv->nv", query, state_of([*past, *made], delta)) / np.sqrt(delta.key_dim)
        out.append(
            np.einsum("nv,nvd->d", gated(read, np.tensordot(token, params.gate, 1), params, config), params.output)
        )
    return np.array(out), made


def state_of(tokens, delta):
    """The states [N,H,V] after some tokens."""
    state = np.zeros((delta.num_heads, delta.key_dim, delta.value_dim))
    for token in tokens:
        state = np.exp(token.g)[:, None, None] * state
        for key, value, beta in zip(token.key, token.value, token.beta, strict=True):
            missing = value - np.einsum("nh,nhv->nv", key, state)
            state = state + beta[:, None, None] * key[:, :, None] * missing[:, None, :]
    return state


def gated(out, gate, params, config):
    delta = config.delta
    if delta.norm == "head":
        return rms(out, config.norm_eps) * params.norm * silu(gate)
    groups = (out * silu(gate)).reshape(delta.num_key_heads, -1)
    return rms(groups, config.norm_eps).reshape(out.shape) * params.norm


def flat(params):
    """The leaves that stand alone."""
    return {name: leaf for name, leaf in vars(params).items() if name not in ("project", "convolve")}
