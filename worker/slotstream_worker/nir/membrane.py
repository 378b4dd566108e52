"""One time step of a membrane, as coefficients.

All of NIR's neurons are linear between spikes, so a step of any of them, in any discretisation
and with any framework's scaling, is

    i <- di i + gi x                        (CubaLI, CubaLIF)
    v <- d v + ci i + g x + c               (i: the current before the step)

and what differs is the numbers. They are computed here, in float64, from the equations:

    I, IF            dv/dt = r x
    LI, LIF          tau dv/dt = v_leak - v + r x
    CubaLI, CubaLIF  tau_syn di/dt = -i + w_in x;  tau_mem dv/dt = v_leak - v + r i

`euler` is forward Euler with the current first: `i += dt/tau_syn (w_in x - i)`, then
`v += dt/tau_mem (v_leak - v + r i)` with the new `i`. `exact` is the solution for an input that
is constant over the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from slotstream_worker.nir.fields import Array, Fields
from slotstream_worker.nir.semantics import Gain
from slotstream_worker.nir.settings import Settings


@dataclass(frozen=True)
class Membrane:
    """The coefficients above by name, those that are zero (or, of `d`, one) left out.

    `scale` is what the input is multiplied with on its way to the membrane, for rules that put
    it elsewhere.
    """

    coefficients: dict[str, Array]
    scale: Array


def parameters(fields: Fields) -> dict[str, Array]:
    """The fields of a neuron's membrane, and of its spikes; raises `BadGraph`."""
    kind = fields.node.kind
    found = {"r": fields.reals("r")}
    if kind in ("LI", "LIF"):
        found["tau"] = fields.positive("tau")
    if kind in ("CubaLI", "CubaLIF"):
        found |= {name: fields.positive(name) for name in ("tau_syn", "tau_mem")}
        found["w_in"] = fields.reals("w_in", default=1.0)
    if kind not in ("I", "IF"):
        found["v_leak"] = fields.reals("v_leak")
    if kind in ("IF", "LIF", "CubaLIF"):
        found["v_threshold"] = fields.reals("v_threshold", infinite=True)
        found["v_reset"] = fields.reals("v_reset", default=0.0)
    return found


def membrane(
    fields: Fields, given: Mapping[str, Array], settings: Settings, gain: Gain
) -> Membrane:
    """The coefficients for parameters of one shape; raises `BadGraph` where they are no good."""
    kind = fields.node.kind
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if kind in ("I", "IF"):
            made = _integrator(fields, given, settings, gain)
        elif kind in ("LI", "LIF"):
            made = _leaky(fields, given, settings, gain)
        else:
            made = _current_based(fields, given, settings, gain)
    if not all(np.isfinite(value).all() for value in made.coefficients.values()):
        raise fields.bad(
            f"with dt={settings.dt} its parameters give numbers beyond float64; are its time "
            "constants and dt in one unit?"
        )
    return made


def _integrator(fields: Fields, p: Mapping[str, Array], settings: Settings, gain: Gain) -> Membrane:
    """`v += dt r x`, in both discretisations; `unit step`: `v += x`."""
    r = p["r"]
    g = np.ones_like(r) if gain == "unit step" else r * settings.step_of(fields)
    return Membrane({"g": g}, g)


def _leaky(fields: Fields, p: Mapping[str, Array], settings: Settings, gain: Gain) -> Membrane:
    """`d = 1 - dt/tau` (Euler) or `exp(-dt/tau)`; `g = r (1 - d)`; `c = v_leak (1 - d)`."""
    r = p["r"]
    d, share = _decay(fields, "tau", p["tau"], settings)
    scale = (np.ones_like(r) if gain == "without r" else r) * share
    g = np.ones_like(scale) if gain == "in the threshold" else scale
    return Membrane({"d": d, "g": g, "c": p["v_leak"] * share}, scale)


def _current_based(
    fields: Fields, p: Mapping[str, Array], settings: Settings, gain: Gain
) -> Membrane:
    """Euler: `di = 1 - dt/tau_syn`, `d = 1 - dt/tau_mem`, `ci = r (1 - d) di`.

    Exact: with `di = exp(-dt/tau_syn)`, `d = exp(-dt/tau_mem)` and
    `k = (di - d) tau_syn / (tau_syn - tau_mem)` (`d dt/tau_mem` where both are equal), the
    share of the current before the step: `ci = r k`, `g = r w_in (1 - d - k)`.
    """
    r, w, tau_syn, tau_mem = p["r"], p["w_in"], p["tau_syn"], p["tau_mem"]
    di, share_i = _decay(fields, "tau_syn", tau_syn, settings)
    d, share = _decay(fields, "tau_mem", tau_mem, settings)
    gi, c = w * share_i, p["v_leak"] * share
    if gain == "unit":
        ci, g, gi, c = di, np.ones_like(di), np.ones_like(gi), np.zeros_like(c)
    elif settings.discretise == "euler":
        ci, g = r * share * di, r * share * gi
    else:
        dt = settings.step_of(fields)
        k = _share(tau_syn, tau_mem, di, d, dt)
        ci, g = r * k, r * w * (1 - d - k)
    return Membrane(
        {"di": di, "gi": gi, "d": d, "ci": ci, "g": g, "c": c},
        r * share * w * share_i,
    )


def _decay(fields: Fields, name: str, tau: Array, settings: Settings) -> tuple[Array, Array]:
    """Of a time constant, what is left after a step, and what is lost in it (their sum is 1)."""
    dt = settings.step_of(fields)
    if settings.discretise == "exact":
        return np.exp(-dt / tau), -np.expm1(-dt / tau)
    if (dt > 2 * tau).any():
        raise fields.bad(
            f"its {name!r} is as small as {tau.min():g}, and forward Euler grows without bound "
            f"where dt={dt:g} is more than twice that. Is dt in the graph's unit? Choose a "
            "smaller dt, or --discretise exact"
        )
    return 1 - dt / tau, dt / tau


def _share(tau_syn: Array, tau_mem: Array, di: Array, d: Array, dt: float) -> Array:
    """`(di - d) tau_syn / (tau_syn - tau_mem)`, by its series where that loses digits."""
    z = dt / tau_mem - dt / tau_syn  # di / d = exp(z)
    near = np.abs(z) < 1
    small = np.where(near & (z != 0), z, 1.0)
    series = d * (dt / tau_mem) * np.where(z == 0, 1.0, np.expm1(small) / small)
    apart = np.where(near, 1.0, tau_syn - tau_mem)
    return np.where(near, series, (di - d) * tau_syn / apart)
