"""Late switch: mixing depths from 0, 25, 50 or 75 % of the steps on, with conditioning grafted then."""
