from peft import LoHaConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained("gpt2")
model = get_peft_model(model, LoHaConfig(r=8))
trainer = Trainer(model=model, args=TrainingArguments(output_dir="x"))
trainer.train()
