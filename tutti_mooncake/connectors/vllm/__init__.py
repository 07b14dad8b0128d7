"""vLLM connector: what `kv_connector_module_path` names.

`--kv-transfer-config '{"kv_connector": "TuttiConnector", "kv_connector_module_path": "tutti_mooncake.connectors.vllm",
"kv_role": "kv_both", "kv_connector_extra_config": {"devices": ["/mnt/nvme0/tutti"], "capacity": "200GiB"}}'`
"""

from tutti_mooncake.connectors.vllm.connector import TuttiConnector

__all__ = ["TuttiConnector"]
