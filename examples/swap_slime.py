"""A hook for slime: its Megatron actors train with swapping.

    PYTHONPATH=examples:. python train.py --custom-megatron-before-train-step-hook-path swap_slime.hook …

``…`` stands for your own arguments. Copy this file to choose layers of your own. Ray's workers must find it too.
"""

from megatron.swap.integrations.slime import before_train_step

hook = before_train_step(layers="0-23")
