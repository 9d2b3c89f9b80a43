tune run lora_finetune_single_device --config torchtune.yaml
