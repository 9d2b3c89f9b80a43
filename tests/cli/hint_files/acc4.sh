accelerate launch --config_file own.yaml train.py --model_name_or_path gpt2
