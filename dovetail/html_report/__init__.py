"""What an artifact decides as one HTML file: tables of `dovetail inspect`, pictures, what-ifs."""
