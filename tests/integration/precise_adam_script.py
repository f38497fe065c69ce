"""The trainer with the precision-aware optimizer, whose Adam is ours: Megatron takes it for TransformerEngine's."""

import sys
import types

from packaging.version import Version

import pretrain_gpt_swap as program
from tests.precise_adam import FusedAdam

if __name__ == "__main__":
    program.prepare(sys.argv)
    from megatron.core import optimizer, utils
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["transformer_engine.pytorch.optimizers"].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    utils.get_te_version = lambda: Version("2.20.2")
    assert optimizer_config.is_te_min_version("2.1.0")
    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
    program.main()
