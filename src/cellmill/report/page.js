"use strict";
// Live figures, folded parts of many runs, sorting, theme and search. Without it the page shows tables and static pictures.
(async () => {
  const root = document.documentElement;
  const packed = Uint8Array.from(atob(document.getElementById("packed").textContent), (byte) => byte.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const { charts, folded } = await new Response(unpacked).json();
  document.querySelectorAll("[data-folded]").forEach((place) => { place.outerHTML = folded[place.dataset.folded]; });

  const keysOf = (chart) => Object.keys(chart.columns);
  const rowsOf = (chart) => {
    const keys = keysOf(chart);
    return (chart.columns[keys[0]] ?? []).map((_, row) => Object.fromEntries(keys.map((key) => [key, chart.columns[key][row]])));
  };
  const save = (name, type, text) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  const csv = (chart) => {
    // a leading =, + or @ would be a formula in a spreadsheet
    const cell = (value) => {
      const text = typeof value === "string" && /^[=+@\t]/.test(value) ? `'${value}` : String(value ?? "");
      return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    };
    const rows = rowsOf(chart).map((row) => Object.values(row));
    return [keysOf(chart), ...rows].map((row) => row.map(cell).join(",")).join("\n") + "\n";
  };
  const button = (text, label, click) => {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = text;
    made.setAttribute("aria-label", label);
    made.addEventListener("click", click);
    return made;
  };

  const draw = async (figure) => {
    const chart = charts[figure.dataset.chart];
    const live = document.createElement("div");
    live.className = "live";
    figure.append(live);
    const spec = { ...chart.spec, width: "container", data: { values: rowsOf(chart) } };
    // ast: expressions are interpreted, so that the page's policy need not allow eval
    const options = { actions: false, ast: true, renderer: chart.canvas ? "canvas" : "svg" };
    const { view } = await window.vegaEmbed(live, spec, options);
    figure.classList.add("drawn");
    const tools = document.createElement("div");
    tools.className = "tools";
    const file = chart.title.replace(/[^\w.-]+/g, "_");
    tools.append(
      button("CSV", `data of ${chart.title}`, () => save(`${file}.csv`, "text/csv", csv(chart))),
      button("SVG", `picture of ${chart.title}`, async () => save(`${file}.svg`, "image/svg+xml", await view.toSVG())),
    );
    figure.append(tools);
  };
  const watch = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      watch.unobserve(target);
      draw(target).catch((error) => console.error(error));
    }
  }, { rootMargin: "300px" });
  document.querySelectorAll("figure.chart").forEach((figure) => watch.observe(figure));

  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const text = head.textContent;
      head.textContent = "";
      head.append(button(text, `sort by ${text}`, () => {
        const down = head.getAttribute("aria-sort") !== "descending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
        const order = (a, b) => {
          const [x, y] = [key(a), key(b)];
          if (x === "–" || y === "–") return (x === "–") - (y === "–");
          const [n, m] = [x, y].map((v) => Number(v.replaceAll(",", "")));
          const sign = Number.isNaN(n) || Number.isNaN(m) ? x.localeCompare(y) : n - m;
          return down ? -sign : sign;
        };
        table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order));
      }));
    });
  }

  const theme = document.getElementById("theme");
  const dark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  theme.hidden = false;
  theme.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    theme.setAttribute("aria-pressed", String(dark()));
  });
  const search = document.getElementById("search");
  search.hidden = false;
  search.addEventListener("input", () => {
    const wanted = search.value.trim().toLowerCase();
    document.querySelectorAll("tbody tr").forEach((row) => { row.hidden = !row.textContent.toLowerCase().includes(wanted); });
  });
})().catch((error) => console.error(error));
