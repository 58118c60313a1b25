"""`make chart`: writes what of chart/ and deploy/ is made of the manifests and the settings; tests compare."""

from scripts import chart_deploy, chart_manifests, chart_values


def main() -> None:
    for part in (chart_values, chart_manifests, chart_deploy):  # each is made of what those before it have written
        for path, text in part.written().items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


if __name__ == "__main__":
    main()
