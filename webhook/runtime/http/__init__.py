"""HTTP listeners, their connections and the budgets that they share."""
