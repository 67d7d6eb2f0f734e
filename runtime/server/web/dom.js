// Elements are made here, and texts only ever become text: nothing is parsed as HTML.

/** Return an element: `h("a.quiet", {href: "#"}, "text", child)`. Null children are left out. */
export function h(what, properties, ...children) {
  const [tag, ...classes] = what.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  fill(element, properties, children);
  return element;
}

/** Return an SVG element. */
export function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.flat().filter((child) => child != null));
  return element;
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties || {})) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && !name.startsWith("aria")) element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child != null && child !== false));
}

export const find = (id) => document.getElementById(id);

/** Have screen readers say a text. */
export function say(text) {
  find("said").textContent = text;
}

/** Ask for a line of text in a dialog; null where it is closed. */
export function ask(title, label, note) {
  const field = h("input", { type: "password", autocomplete: "off", required: true });
  const form = h(
    "form", { method: "dialog" },
    h("h2", {}, title), h("p", {}, note), h("label.field", {}, label, field),
    h("div.actions", {},
      h("button.quiet", { type: "button", onclick: () => dialog.close("") }, "Cancel"),
      h("button.primary", { type: "submit", value: "ok" }, "Continue")),
  );
  const dialog = h("dialog", { "aria-label": title }, form);
  document.body.append(dialog);
  dialog.showModal();
  field.focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "ok" ? field.value : null);
    });
  });
}

/** Offer `text` as a file. */
export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = h("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

const THEMES = ["auto", "light", "dark"];

/** Have a button turn the theme: that of the system, light, dark. */
export function setUpTheme(button) {
  let theme = localStorage.getItem("dovetail-theme") || "auto";
  const show = () => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = { auto: "◐", light: "☀", dark: "☾" }[theme];
    button.setAttribute("aria-label", `Theme: ${theme}`);
    button.title = `Theme: ${theme}`;
  };
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    localStorage.setItem("dovetail-theme", theme);
    show();
  });
  show();
}
