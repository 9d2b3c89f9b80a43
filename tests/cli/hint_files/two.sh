torchrun train.py --model_name_or_path gpt2
torchrun train2.py --model_name_or_path gpt2
