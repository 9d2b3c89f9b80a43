from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, losses

model = SentenceTransformer("bert-base-uncased")
loss = losses.MultipleNegativesRankingLoss(model)
trainer = SentenceTransformerTrainer(model=model, loss=loss)
trainer.train()
