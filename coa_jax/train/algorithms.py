"""Reinforcement-learning algorithms: named presets, each of whose settings can be overridden.

An algorithm is a combination of an advantage estimator, a loss, a normalisation and clip bounds. A
config names a preset. A setting that the config leaves unset (-1 for a number, "" for a string) has
the preset's value. A setting that the config file or the command line gives
(``--config.algorithm.name=gspo --config.algorithm.clip_high=0.001``) overrides the preset.
docs/algorithms.md lists the presets; docs/extending.md explains how to write an advantage or a
loss.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from coa_jax.config.extensions import BoundFunction, ExtensionKind, Named, bind
from coa_jax.config.fields import MAX_INT, Between, Bounded, OneOf
from coa_jax.errors import UserError

F = TypeVar("F", bound=Callable[..., Any])

UNSET = -1.0
"""Marks a number as unset: the preset's number applies. For no setting is -1 a valid value."""

ADVANTAGES = ExtensionKind(
    "advantage",
    "coa_jax.advantages",
    {
        "group": "coa_jax.train.advantages:standard_scores",
        "mean": "coa_jax.train.advantages:less_mean",
        "leave_one_out": "coa_jax.train.advantages:less_others",
        "batch": "coa_jax.train.advantages:of_step",
        "batch_baseline": "coa_jax.train.advantages:of_step_less_mean",
        "gae": "coa_jax.train.advantages:of_critic",
        "none": "coa_jax.train.advantages:nothing",
    },
    offers=("rewards", "lengths", "trajectories"),
    needs=("rewards", "trajectories"),
)
"""Advantage functions, which are NumPy functions of the graded samples of a group.

The parameters of an advantage function may be any of ``rewards``, float64 ``[n]``; ``lengths``, the
number of policy tokens of each sample, int64 ``[n]``; and ``trajectories``, the n samples. The
function returns, for each sample, a number or an array with one number per token; see
`advantages.advantages_of`.

The decorator `marked` declares properties of the function. ``alone`` says that the function does
not compare samples with each other. ``whitened`` says that the function returns rewards, from which
`advantages.gae` computes advantages that `advantages.whiten` standardises. ``critic`` says that
`advantages.gae` uses the values of a critic too.
"""

LOSSES = ExtensionKind(
    "loss",
    "coa_jax.losses",
    {
        "clip": "coa_jax.train.objectives:clip",
        "sequence_clip": "coa_jax.train.objectives:sequence_clip",
        "cispo": "coa_jax.train.objectives:cispo",
    },
    offers=(
        *("logp", "old_logp", "log_ratio", "ratio", "advantages", "mask", "segment_ids"),
        *("entropy", "clip_low", "clip_high", "dual_clip"),
    ),
    needs=("logp", "log_ratio", "ratio"),
)
"""Loss functions, which are pure JAX functions that return the loss of each token.

`objectives.loss_arguments` describes the arguments and the result. The mark ``of_sequence`` (see
`marked`) declares that the loss needs one advantage for all tokens of a sequence.
"""

NORMALISATIONS = ("token", "sequence", "constant")
_DIFFERENCES: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"normalise": "sequence", "kl_coef": 0.04},
    "dapo": {"learn_from": "signal", "clip_high": 0.28, "dual_clip": 3.0},
    "dr_grpo": {"advantage": "mean", "normalise": "constant"},
    "rloo": {"advantage": "leave_one_out", "normalise": "constant"},
    "gspo": {
        "loss": "sequence_clip",
        "normalise": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "old_logp": "trainer",
        "tis_cap": 2.0,
        "tis_level": "geometric",
    },
    "cispo": {"loss": "cispo", "learn_from": "signal", "clip_low": 1.0, "clip_high": 4.0},
    "reinforce++": {"advantage": "batch", "kl": "k1", "kl_in": "reward", "kl_coef": 1e-3},
    "reinforce++_baseline": {"advantage": "batch_baseline", "kl": "k2", "kl_coef": 1e-3},
    "ppo": {"advantage": "gae", "dual_clip": 3.0, "kl_coef": 1e-3},
    "opd": {"advantage": "none", "opd_coef": 1.0, "old_logp": "trainer", "tis_cap": 2.0},
}
"""The settings in which each preset differs from those that `presets` gives to all of them."""

NAMES = tuple(_DIFFERENCES)
"""Names of the presets."""

RATIO_LEVELS = ("token", "sequence", "geometric")
"""Levels at which `objectives.correction` computes the ratio trainer / sampler."""

Knob = Annotated[float, Between(0, 1e6, also=(-1,))]
WholeKnob = Annotated[int, Between(0, MAX_INT, also=(-1,))]


@dataclasses.dataclass(frozen=True)
class Algorithm(Bounded):
    """The name of a preset, and settings that replace those of the preset.

    Attributes:
        name: grpo, dapo, dr_grpo, rloo, gspo, cispo, ppo or another preset: reinforce++,
            reinforce++_baseline or opd. `resolve` takes from the preset every setting that is
            unset, which means -1 for a number and "" for a name.
        advantage: the advantage estimator. A group holds the samples of one task. ``group``
            standardises the rewards within a group. ``mean`` subtracts the mean reward of the group
            from each reward; ``leave_one_out`` subtracts the mean reward of the other samples.
            ``batch`` standardises over the whole step; ``batch_baseline`` first subtracts the mean
            reward of the group. ``gae`` uses a critic. ``none`` uses only a teacher's advantages.
            ``package.module:name`` names a function of your own, see `ADVANTAGES`.
        advantage_options: keyword arguments of the advantage function.
        loss: the policy loss. ``clip`` is PPO's clipped loss with a ratio per token.
            ``sequence_clip`` is the same loss with a ratio per sequence (GSPO). ``cispo`` clips the
            ratio by which the gradient of a token is multiplied, so no token loses its gradient.
            ``package.module:name`` names a function of your own, see `LOSSES`.
        loss_options: keyword arguments of the loss function. If the loss function has parameters
            named ``clip_low``, ``clip_high`` or ``dual_clip``, these receive the settings of the
            same name.
        normalise: how the losses of tokens are averaged. For an update with S sequences and N
            policy tokens, ``token`` gives ``sum(losses) / N``, and ``constant`` gives
            ``sum(losses) / (S * loss_length)``; ``sequence`` averages within each sequence, and
            then over the sequences. See `objectives.weigh`.
        learn_from: groups to train on: ``all`` for every group, ``signal`` for groups whose rewards
            differ. With ``signal``, sampling continues until the step has enough such groups.
        clip_low: lower clip bound: where the ratio of a token is below ``1 - clip_low``, the loss
            does not lower the token's probability any further.
        clip_high: upper clip bound: where the ratio of a token is above ``1 + clip_high``, the loss
            does not raise the token's probability any further.
        dual_clip: constant c of dual-clip PPO: the loss of a token with an advantage A < 0 is at
            most ``-c A``; 0 for no bound.
        negative_weight: factor by which negative advantages are multiplied; 1 leaves them
            unchanged. With a factor below 1, successful samples have more weight than unsuccessful
            samples. Then pass@1 rises faster, but the samples become less diverse, which lowers
            pass@k (Xiong et al. 2025, arXiv 2504.11343; Zhu et al. 2025, arXiv 2506.01347).
        loss_length: number of tokens by which ``normalise=constant`` divides the sum of the token
            losses of a sequence.
        kl: estimator of the KL divergence between the policy and the initial policy of the run:
            ``k1``, ``k2`` or ``k3``, see `objectives.kl_estimate`.
        kl_in: where the KL penalty enters: ``loss`` adds the penalty to the loss, ``reward``
            subtracts the penalty from the reward of each token.
        kl_coef: factor of the KL penalty. With 0 there is no penalty, so the run needs no frozen
            copy of the initial parameters.
        entropy_coef: factor of the entropy bonus; 0 for no bonus.
        opd_coef: factor by which a teacher's advantages of tokens (on-policy distillation) are
            multiplied before they are added to the advantages that ``advantage`` gives; 0 for no
            teacher. See `advantages.distillation`.
        old_logp: source of the log-probabilities in the denominator of the loss's ratio. With
            ``sampler``, the log-probabilities are those that the engine recorded while sampling;
            with ``trainer``, the trainer computes the log-probabilities before the step's first
            update (the proximal policy of decoupled PPO).
        tis_cap: upper bound of the importance weight by which the loss of a token is multiplied
            (truncated importance sampling). The weight is the ratio ``p_trainer / p_sampler`` of
            the token's probabilities in the trainer and in the engine that sampled it. 0 for no
            importance weight. See `objectives.correction`.
        tis_level: level of the importance weight of a token: ``token`` for the ratio of the token
            itself, ``sequence`` for the product of the ratios of all policy tokens in the token's
            sequence, and ``geometric`` for the geometric mean of these ratios.
        mask_low: lower bound of the ratio ``p_trainer / p_sampler``; a token with a smaller ratio
            has no loss. 0 for no bound.
        mask_high: upper bound of the ratio ``p_trainer / p_sampler``; a token with a larger ratio
            has no loss. 0 for no bound.
        mask_level: level of the ratio that ``mask_low`` and ``mask_high`` bound: ``token``,
            ``sequence`` or ``geometric``, as in ``tis_level``.
        overlong_buffer: number of tokens at the end of the budget ``rollout.max_tokens`` that lower
            the reward. A trajectory gets a lower reward if its length is above
            ``rollout.max_tokens`` minus this number, see ``overlong_penalty``. 0 for no length
            penalty. See `train.shaping`.
        overlong_penalty: amount by which the reward is lowered if the trajectory uses up the token
            budget ``rollout.max_tokens``. Over the last ``overlong_buffer`` tokens of the budget,
            the reduction grows linearly from 0 to this amount.
        gamma: discount factor of generalised advantage estimation.
        lam: trace decay (lambda) of generalised advantage estimation.
        value_clip: bound on the change of the critic's values within a step: where a value has
            moved farther than this from its value before the step, the loss does not move the value
            any further. 0 for no bound.
        critic_learning_rate: learning rate of the critic. The critic's other optimiser settings are
            those of the policy.
        critic_warmup_steps: number of updates during which the critic's learning rate rises
            linearly to ``critic_learning_rate``.
    """

    name: Annotated[str, OneOf(*NAMES)] = "grpo"
    advantage: Annotated[str, Named(ADVANTAGES, "")] = ""
    advantage_options: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    loss: Annotated[str, Named(LOSSES, "")] = ""
    loss_options: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    normalise: Annotated[str, OneOf("", *NORMALISATIONS)] = ""
    learn_from: Literal["", "all", "signal"] = ""
    clip_low: Annotated[float, Between(0, 1, also=(-1,))] = UNSET
    clip_high: Knob = UNSET
    dual_clip: Annotated[float, Between(1, 1e6, above=True, also=(0, -1))] = UNSET
    negative_weight: Knob = UNSET
    loss_length: Annotated[int, Between(1, MAX_INT, also=(-1,))] = int(UNSET)
    kl: Literal["", "k1", "k2", "k3"] = ""
    kl_in: Literal["", "loss", "reward"] = ""
    kl_coef: Knob = UNSET
    entropy_coef: Knob = UNSET
    old_logp: Literal["", "sampler", "trainer"] = ""
    opd_coef: Knob = UNSET
    tis_cap: Knob = UNSET
    tis_level: Annotated[str, OneOf("", *RATIO_LEVELS)] = ""
    mask_low: Knob = UNSET
    mask_high: Knob = UNSET
    mask_level: Annotated[str, OneOf("", *RATIO_LEVELS)] = ""
    overlong_buffer: WholeKnob = int(UNSET)
    overlong_penalty: Knob = UNSET
    gamma: Annotated[float, Between(0, 1, also=(-1,))] = UNSET
    lam: Annotated[float, Between(0, 1, also=(-1,))] = UNSET
    value_clip: Knob = UNSET
    critic_learning_rate: Annotated[float, Between(0, 10, also=(-1,))] = UNSET
    critic_warmup_steps: WholeKnob = int(UNSET)

    def resolve(self, budget: int) -> Algorithm:
        """Returns the algorithm with every setting filled in from the preset.

        Args:
            budget: maximum number of tokens of a trajectory, from which some presets derive
                ``overlong_buffer`` and ``loss_length``.

        Raises:
            UserError: the settings contradict each other.
        """
        known = presets(budget)
        knobs = {k: v for k, v in dataclasses.asdict(self).items() if v not in ("", UNSET)}
        chosen = dataclasses.replace(known[self.name], **knobs)
        _check(chosen, budget, own_dual_clip=self.dual_clip > 0)
        return chosen

    @functools.cached_property
    def advantage_call(self) -> BoundFunction:
        """The advantage function that the settings name, with its options."""
        return bind(ADVANTAGES, self.advantage, self.advantage_options, "algorithm.advantage")

    @functools.cached_property
    def loss_call(self) -> BoundFunction:
        """The loss function that the settings name, with its options."""
        return bind(LOSSES, self.loss, self.loss_options, "algorithm.loss")

    @property
    def alone(self) -> bool:
        """Whether a sample's advantage does not depend on other samples of the same task."""
        return has_mark(self.advantage_call, "alone")

    @property
    def needs_critic(self) -> bool:
        """Whether a critic (value model) is trained beside the policy."""
        return has_mark(self.advantage_call, "critic")

    @property
    def whitened(self) -> bool:
        """Whether `gae` computes the advantages of tokens, and `whiten` then standardises them.

        The two always run together, on the rewards that the advantage function returns. `gae` uses
        a critic only if `needs_critic` is true.
        """
        return self.needs_critic or has_mark(self.advantage_call, "whitened")

    @property
    def of_sequence(self) -> bool:
        """Whether the loss requires the same advantage for all tokens of a sequence, as in GSPO."""
        return has_mark(self.loss_call, "of_sequence")

    @property
    def needs_reference(self) -> bool:
        """Whether a KL penalty needs the log-probabilities of the run's initial policy."""
        return self.kl_coef > 0

    @property
    def masks(self) -> bool:
        """Whether the loss leaves out tokens because of ``mask_low`` or ``mask_high``.

        These settings bound the ratio of the trainer's to the sampler's probability of a token.
        """
        return self.mask_low > 0 or self.mask_high > 0

    def check_stale(self, why: str) -> None:
        """Checks that the loss corrects for samples that came from older policies.

        With ``old_logp=sampler``, the ratio in the loss always does so, because its denominator is
        the probability with which the older policy sampled the token.

        Args:
            why: text about the setting that allows older samples, with which the error message
                starts.

        Raises:
            UserError: ``old_logp`` is ``trainer``, and neither an importance weight (``tis_cap``)
                nor a mask (``mask_low``, ``mask_high``) corrects for the policy that sampled.
        """
        if self.old_logp == "trainer" and not self.tis_cap and not self.masks:
            raise UserError(
                f"{why} and algorithm.old_logp is 'trainer': nothing corrects for the policy that "
                "sampled; give algorithm.tis_cap=2 or algorithm.old_logp=sampler"
            )


def marked(**marks: bool) -> Callable[[F], F]:
    """Returns a decorator that declares properties (marks) of an advantage or loss function.

    `ADVANTAGES` and `LOSSES` list the properties.
    """

    def mark(function: F) -> F:
        vars(function).update(marks)
        return function

    return mark


def has_mark(call: BoundFunction, name: str) -> bool:
    """Returns whether a function has the property ``name``, which `marked` declares.

    Args:
        call: advantage or loss function with its options.
        name: name of the property.
    """
    return bool(getattr(call.function, name, False))


def presets(budget: int) -> dict[str, Algorithm]:
    """Returns the presets by name; docs/algorithms.md has their sources and deviations.

    Args:
        budget: maximum number of tokens of a trajectory.
    """
    plain = Algorithm(
        advantage="group",
        loss="clip",
        normalise="token",
        learn_from="all",
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=0.0,
        negative_weight=1.0,
        loss_length=budget,
        kl="k3",
        kl_in="loss",
        kl_coef=0.0,
        entropy_coef=0.0,
        opd_coef=0.0,
        old_logp="sampler",
        tis_cap=0.0,
        tis_level="token",
        mask_low=0.0,
        mask_high=0.0,
        mask_level="token",
        overlong_buffer=0,
        overlong_penalty=1.0,
        gamma=1.0,
        lam=1.0,
        value_clip=0.5,
        critic_learning_rate=1e-5,
        critic_warmup_steps=0,
    )
    known = {
        name: dataclasses.replace(plain, name=name, **knobs) for name, knobs in _DIFFERENCES.items()
    }
    # The buffer of DAPO is the last fifth of the budget.
    return {**known, "dapo": dataclasses.replace(known["dapo"], overlong_buffer=budget // 5)}


def _check(a: Algorithm, budget: int, own_dual_clip: bool) -> None:
    """Raises `UserError` if settings of the resolved algorithm ``a`` contradict each other."""

    def refuse(knob: str, advice: str) -> None:
        raise UserError(f"algorithm.{knob} is {getattr(a, knob)!r} (algorithm {a.name}); {advice}")

    if own_dual_clip and "dual_clip" not in a.loss_call.asks:
        refuse("dual_clip", f"the loss {a.loss} does not take it: give 0")
    if a.overlong_buffer > budget:
        refuse("overlong_buffer", f"the budget is {budget} tokens: give at most that")
    if a.of_sequence and (a.whitened or a.opd_coef):
        which = "a teacher" if a.opd_coef else f"advantage={a.advantage}"
        other = "opd_coef=0" if a.opd_coef else "advantage=group"
        refuse(
            "loss",
            f"a sequence-level ratio needs one advantage per sequence, and {which} has one per "
            f"token: give loss=clip, or {other}",
        )
    if a.advantage == "none" and not a.opd_coef:
        refuse("advantage", "without a teacher nothing is learned: give opd_coef=1")
    if a.mask_high and a.mask_low >= a.mask_high:
        refuse("mask_low", f"mask_high is {a.mask_high:g}: give less than that")
    if a.kl_coef and a.kl_in == "reward" and not (a.alone and a.whitened):
        refuse(
            "kl_in",
            f"advantage={a.advantage} takes one reward per sequence: give kl_in=loss, or "
            "advantage=batch or gae",
        )
    if a.kl_coef and a.kl_in == "loss" and a.kl == "k1":
        refuse(
            "kl",
            "as a loss k1 has the gradient of the log-probability, whose mean is zero: give k2 "
            "or k3, or kl_in=reward",
        )
    if a.tis_cap and a.old_logp == "sampler":
        refuse(
            "tis_cap",
            "the ratio to the sampler corrects the mismatch already: give old_logp=trainer, or "
            "tis_cap=0",
        )
    if a.needs_critic and not a.critic_learning_rate:
        refuse("critic_learning_rate", f"advantage={a.advantage} learns values: give more than 0")
