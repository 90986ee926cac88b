"""Charts of the page. Each chart has a live version for browsers and a static picture.

- `curves`, `cell_counts` and `umap` make charts from values. Their `make_…_chart` functions return
  a `Chart` (`chart`).
- `page_charts` puts the charts of a page together. It draws a static picture of each chart with
  `svg`, `png` and `umap`. Their `draw_…` functions return a picture.
- vega.json has the Vega-Lite specification of each kind of chart.
"""
