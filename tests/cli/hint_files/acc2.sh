accelerate launch train.py --model_name_or_path gpt2
