deepspeed --include "a:0,1@b:0" train.py --model_name_or_path gpt2
