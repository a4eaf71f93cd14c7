"""An RL loop of one's own: a policy learns to write the letter e."""

import sys

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import coa_jax


@nnx.jit
def update(policy, optimizer, batch):
    def loss(policy):  # REINFORCE
        logps = coa_jax.log_probs(policy, batch)
        return -jnp.sum(batch.mask * batch.advantage * logps) / jnp.sum(batch.mask)

    optimizer.update(policy, nnx.grad(loss)(policy))


def train(path, steps=20, samples=32, length=24):
    policy = coa_jax.load(path)
    optimizer = nnx.Optimizer(policy, optax.adam(3e-3), wrt=nnx.Param)
    budget, sampling = coa_jax.RolloutConfig(max_tokens=length), coa_jax.SamplingParams()
    agent = coa_jax.Agent(policy, [], slots=samples, sampling=sampling, rollout=budget)
    prompt = policy.tokenizer.encode("The letter:")
    for step in range(steps):
        (group,) = agent.sample([prompt], n=samples, seed=step)
        rewards = np.array([trajectory.text.count("e") for trajectory in group])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        examples = list(map(coa_jax.trajectory_example, group, advantages))
        (batch,) = coa_jax.split_rows(coa_jax.pack(examples, length), samples)
        update(policy, optimizer, batch)
        agent.publish(policy)
        yield rewards.mean()


if __name__ == "__main__":
    print(*(f"{reward:.2f} times the letter e" for reward in train(sys.argv[1])), sep="\n")
