"""Parts of benchmarks/campaign/campaign.py and benchmarks/campaign/report.py."""
