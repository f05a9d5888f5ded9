"""The nouns: frozen, validated data that both wings share. No torch here."""
