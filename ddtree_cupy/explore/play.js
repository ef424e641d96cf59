// The controls of `explore.play`. Everything that is shown is computed in ddtree_cupy/explore/play.py.

function add(parent, tag, options = {}) {
  const element = Object.assign(document.createElement(tag), options);
  parent.append(element);
  return element;
}

function render({ model, el }) {
  const options = model.get("options");
  const controls = add(el, "div");
  controls.style.cssText = "display:flex;flex-wrap:wrap;gap:.5em 1.5em;align-items:center";
  const inputs = {};

  function choose(name, value) {
    model.set(name, value);
    model.save_changes();
  }

  function slider(name, max, event) {
    const label = add(controls, "label", { textContent: name + " " });
    inputs[name] = add(label, "input", { type: "range", min: 0, max, ariaLabel: name });
    inputs[name].style.verticalAlign = "middle";
    const number = add(label, "output");
    inputs[name].addEventListener("input", () => (number.textContent = " " + inputs[name].value));
    inputs[name].addEventListener(event, () => choose(name, Number(inputs[name].value)));
  }

  function menu(name, entries) {
    const label = add(controls, "label", { textContent: name + " " });
    inputs[name] = add(label, "select", { ariaLabel: name });
    for (const entry of entries) add(inputs[name], "option", { value: entry, textContent: entry });
    inputs[name].addEventListener("change", () => choose(name, inputs[name].value));
  }

  slider("position", options.num_positions - 1, "input");
  const next = add(controls, "button", { type: "button", textContent: "next round" });
  next.addEventListener("click", () => choose("position", model.get("view").next));
  menu("policy", options.policies);
  slider("budget", options.max_budget, "change"); // a replay of all prompts: once, at the end of the movement
  menu("cost", options.costs);

  const lines = add(el, "pre", { className: "ddtree-lines" });
  const picture = add(el, "div", { className: "tex2jax_ignore mathjax_ignore" });
  picture.style.cssText = "overflow:auto;max-height:600px";
  const reason = add(el, "pre", { className: "ddtree-reason" });
  for (const text of [lines, reason]) {
    text.style.cssText = "margin:.5em 0;color:inherit;background:none;white-space:pre-wrap;overflow-wrap:anywhere";
    text.style.minHeight = "6em";
  }

  function explain(node) {
    const hint = "click a node to learn why it is in the tree or not";
    reason.textContent = node ? node.querySelector("title").textContent : hint;
  }

  picture.addEventListener("click", (event) => {
    const node = event.target.closest("g[data-node]");
    for (const other of picture.querySelectorAll("g.chosen")) other.classList.remove("chosen");
    if (node) node.classList.add("chosen");
    explain(node);
  });
  picture.addEventListener("mouseover", (event) => {
    const node = event.target.closest("g[data-node]");
    if (node) explain(node);
  });
  picture.addEventListener("mouseleave", () => explain(picture.querySelector("g.chosen")));

  function setInputs() {
    for (const [name, input] of Object.entries(inputs)) {
      input.value = model.get(name);
      if (input.type === "range") input.nextSibling.textContent = " " + input.value;
    }
  }

  function setView() {
    const view = model.get("view");
    lines.textContent = view.lines.join("\n");
    picture.innerHTML = view.svg; // escaped where it was made
    const root = picture.querySelector("circle");
    if (root) picture.scrollTop = root.cy.baseVal.value - picture.clientHeight / 2;
    explain(null);
  }

  for (const name of Object.keys(inputs)) model.on("change:" + name, setInputs);
  model.on("change:view", setView);
  setInputs();
  setView();
}

export default { render };
