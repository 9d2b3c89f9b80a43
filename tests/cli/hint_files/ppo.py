from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

model = AutoModelForCausalLMWithValueHead.from_pretrained("gpt2")
config = PPOConfig(batch_size=8, mini_batch_size=2)
trainer = PPOTrainer(config, model, None, None)
trainer.step()
