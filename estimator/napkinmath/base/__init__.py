"""What every room uses: symbolic sizes, types, units, records, errors, values as people write
them."""
