"""The site: its pages, its builder (`make site`), and the JavaScript it carries along."""
