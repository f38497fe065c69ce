"""A plugin for ms-swift: makes ``--callbacks swap`` known to it.

    PYTHONPATH=. megatron sft --external_plugins examples/swap_ms_swift.py --callbacks swap …

``…`` stands for your own arguments. Copy this file to set a budget or layers of your own.
"""

from megatron.swap.integrations.ms_swift import register

register(memory_gib=70)  # or layers="0-23"
