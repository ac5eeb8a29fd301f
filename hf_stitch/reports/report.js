"use strict";
(function () {
  const sections = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const shown = [];

  function themed(layout) {
    const style = getComputedStyle(document.documentElement);
    const text = style.getPropertyValue("--text").trim(), line = style.getPropertyValue("--line").trim();
    const axis = (own) => Object.assign({ gridcolor: line, zerolinecolor: line }, own);
    return Object.assign(
      { margin: { t: 40, r: 10 }, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 } }, layout,
      { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: text, family: "system-ui, sans-serif" },
        xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis), autosize: true });
  }

  function draw(place, traces, layout) {
    const drawn = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] };
    return Plotly.react(place, traces, themed(layout), drawn);
  }

  function plain(text) {
    return text.replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
  }

  function fill(select, names) {
    names.forEach((name, place) => select.add(new Option(plain(name), String(place))));
  }

  function profiles(figure, heat) {
    const row = figure.querySelector("select.row"), column = figure.querySelector("select.column");
    const place = figure.querySelector(".profile");
    fill(row, heat.y);
    fill(column, heat.x);
    function show() {
      const i = Number(row.value), j = Number(column.value);
      const line = (x, y, name, axes) => Object.assign(
        { type: "scatter", mode: "lines+markers", x: x, y: y, name: name, hovertemplate: "%{x}: %{y:.4f}<extra></extra>" }, axes);
      const narrow = place.clientWidth < 600, axis = { automargin: true, type: "category" };
      draw(place, [
        line(heat.x, heat.z[i], "row " + heat.y[i], { marker: { color: "#0072b2" } }),
        line(heat.y, heat.z.map((values) => values[j]), "column " + heat.x[j],
          { xaxis: "x2", yaxis: "y2", marker: { color: "#d55e00" } }),
      ], { height: narrow ? 560 : 360, margin: { t: 60, r: 10 },
           xaxis: Object.assign({ domain: narrow ? [0, 1] : [0, 0.45] }, axis),
           xaxis2: Object.assign({ domain: narrow ? [0, 1] : [0.55, 1], anchor: "y2" }, axis),
           yaxis: { automargin: true, domain: narrow ? [0.64, 1] : [0, 1] },
           yaxis2: { automargin: true, domain: narrow ? [0, 0.36] : [0, 1], anchor: "x2", matches: "y" } });
    }
    row.addEventListener("change", show);
    column.addEventListener("change", show);
    figure.querySelector(".plot").on("plotly_click", (event) => {
      const point = event.points.find((each) => each.data.type === "heatmap");
      if (!point) return;
      row.value = String(heat.y.indexOf(point.y));
      column.value = String(heat.x.indexOf(point.x));
      show();
    });
    shown.push(show);
    show();
  }

  document.querySelectorAll("figure").forEach((figure) => {
    const place = figure.querySelector(".plot");
    if (!place) return;
    const own = sections[Number(figure.dataset.section)][Number(figure.dataset.figure)];
    const names = Object.keys(own.views), choice = figure.querySelector("select.view");
    const show = () => draw(place, own.views[choice ? choice.value : names[0]], own.layout);
    if (choice) choice.addEventListener("change", show);
    shown.push(show);
    show().then(() => {
      if ("profiles" in figure.dataset) profiles(figure, own.views[names[0]].find((trace) => trace.type === "heatmap"));
      figure.dataset.ready = "";
    });
  });
  dark.addEventListener("change", () => shown.forEach((show) => show()));
})();
