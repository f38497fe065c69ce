"""A module for verl's ``external_lib``: the actor trains with swapping.

    export PYTHONPATH=examples:.
    python -m verl.trainer.main_ppo model_engine=megatron actor_rollout_ref.model.external_lib=swap_verl …

``…`` stands for your own settings. Copy this file to set a budget or layers of your own. Ray's workers must find it
too.
"""

from megatron.swap.integrations.verl import register

register(memory_gib=40)  # what a step may take beside the rollout engine; or layers="0-23"
