"""Parts of benchmarks/campaign.py and benchmarks/report.py."""
