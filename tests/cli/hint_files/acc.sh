accelerate launch --config_file $CFG train.py --model_name_or_path gpt2
