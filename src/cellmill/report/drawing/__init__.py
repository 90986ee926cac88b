"""Charts of the page, live and as static pictures.

`curves`, `cell_counts` and `umap` make a `chart` from values; `page_charts` puts it on the page,
with a picture by `svg` and `png`. So `make_…_chart` returns a `Chart`, and `draw_…` a picture.
vega.json has the Vega-Lite specification of each kind of chart.
"""
