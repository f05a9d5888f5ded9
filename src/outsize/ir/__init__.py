"""Defines the nouns that both wings share: frozen, validated data. No torch here."""
