"""What a machine keeps in stock: models and engines that can be fetched."""
