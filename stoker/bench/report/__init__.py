"""`stoker report`: traces and benchmark results as one HTML page that needs nothing but itself."""
